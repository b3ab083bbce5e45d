"""Which job starts where and when: a pure function of queue, hosts and quotas, and what feeds it and writes it down."""
