// A machine whose clock is off by SKEW_S seconds: what libc tells of the time of day, and nothing else.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock)(clockid_t, struct timespec *);

int clock_gettime(clockid_t clock, struct timespec *told) {
  if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
  int answer = real_clock(clock, told);
  if (answer == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += SKEW_S;
  return answer;
}

int gettimeofday(struct timeval *told, void *zone) {
  struct timespec now;
  int answer = clock_gettime(CLOCK_REALTIME, &now);
  told->tv_sec = now.tv_sec;
  told->tv_usec = now.tv_nsec / 1000;
  return answer;
}

time_t time(time_t *told) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (told) *told = now.tv_sec;
  return now.tv_sec;
}
