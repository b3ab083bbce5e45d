/* What a stream has begun and what may not be over: the receives of nccl.c. */
enum { MOST_PENDING = 256 };
struct pending { volatile int is_over; };

void begin(void *stream, struct pending *what);
void give_up(const char *why) __attribute__((noreturn));
