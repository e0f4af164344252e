// What g++'s static libstdc++ and newer C headers take from glibc 2.32 and later, made of functions of glibc 2.28.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

struct stat;
int __xstat(int, const char*, struct stat*);
int __fxstat(int, int, struct stat*);
int getentropy(void*, size_t);

enum { kStatVersion = 1 };  // the layout of struct stat on x86-64

// Threads may exist at any time, so libstdc++ counts references atomically.
char __libc_single_threaded = 0;

int stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
int fstat(int file, struct stat* out) { return __fxstat(kStatVersion, file, out); }

uint32_t arc4random(void) {
  uint32_t word;
  if (getentropy(&word, sizeof word) != 0) abort();
  return word;
}

static int64_t nanoseconds(const struct timespec* t) { return t->tv_sec * INT64_C(1000000000) + t->tv_nsec; }

// Waits by the realtime clock for as long as `until` is ahead of `clock` now; C++ waits allow a spurious timeout.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  struct timespec now, real;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &real) != 0) return EINVAL;
  const int64_t left = nanoseconds(until) - nanoseconds(&now), at = nanoseconds(&real) + (left > 0 ? left : 0);
  const struct timespec end = {at / 1000000000, at % 1000000000};
  return pthread_cond_timedwait(condition, mutex, &end);
}

// Headers of glibc 2.38 and later call these names; C23's binary literals are the only difference.
#define AS_BEFORE(type, name)                                                                      \
  type before_##name(const char*, char**, int) __asm__(#name);                                     \
  type __isoc23_##name(const char* text, char** end, int base) { return before_##name(text, end, base); }
AS_BEFORE(long, strtol)
AS_BEFORE(long long, strtoll)
AS_BEFORE(unsigned long, strtoul)
AS_BEFORE(unsigned long long, strtoull)
