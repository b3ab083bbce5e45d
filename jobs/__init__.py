"""The Django app: jobs, hosts, queue, scheduler, REST, pages, websockets, admin. No torch."""
