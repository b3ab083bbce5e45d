/* NCCL between processes of one machine, through files in memory: slow, and the same in what it asks of its callers.
 *
 * A communicator is made, and a collective ends, when every member has called for it, in one order; a caller stands
 * still meanwhile, where NCCL's stream would. A send is over at once. A receive is waited for by a thread of its own,
 * and its stream's events are over after it (cuda.c). Sizes that differ between members end the process.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pending.h"

enum { MOST_RANKS = 64, PATIENCE_US = 120 * 1000 * 1000, LOOK_US = 50, ID_BYTES = 12, PATH = 160 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 }; /* ncclDataType_t */
enum { SUM, PRODUCT, MOST, LEAST, MEAN };                                                /* ncclRedOp_t */

typedef struct { unsigned char bytes[128]; } unique_id;
struct meeting { volatile int here, times; };
struct communicator {
  int size, rank;
  char id[2 * ID_BYTES + 1];
  long collectives, sent[MOST_RANKS], received[MOST_RANKS];
  struct meeting *meeting;
};
struct receive {
  struct pending pending; /* first: a stream knows no more of it */
  char path[PATH];
  void *to;
  size_t size;
};

void give_up(const char *why) {
  fprintf(stderr, "stand-in: rank %s: %s\n", getenv("RANK"), why);
  abort();
}

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  if (type > BFLOAT16) give_up("a collective of a type that is not stood in for");
  return sizes[type];
}

/* Members meet. */

static void meet(struct communicator *c) {
  int before = c->meeting->times;
  if (__sync_add_and_fetch(&c->meeting->here, 1) == c->size) {
    c->meeting->here = 0;
    __sync_synchronize();
    c->meeting->times = before + 1;
    return;
  }
  for (long us = 0; c->meeting->times == before; us += LOOK_US) {
    if (us > PATIENCE_US) give_up("the other members of a group never came");
    usleep(LOOK_US);
  }
}

static int made(struct communicator **out, int size, int rank, const unique_id *id) {
  struct communicator *c = calloc(1, sizeof *c);
  char path[PATH];
  if (size > MOST_RANKS) give_up("a group of more ranks than are stood in for");
  c->size = size;
  c->rank = rank;
  for (int i = 0; i < ID_BYTES; i++) sprintf(c->id + 2 * i, "%02x", id->bytes[i]);
  snprintf(path, PATH, "/dev/shm/stand-in-%s", c->id);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof *c->meeting)) give_up("no file in memory can be made");
  c->meeting = mmap(NULL, sizeof *c->meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  meet(c);
  unlink(path);
  *out = c;
  return 0;
}

int ncclGetVersion(int *version) { *version = 22800; return 0; }
int ncclGetUniqueId(unique_id *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? 0 : 1; }
int ncclCommInitRank(void **out, int size, unique_id id, int rank) { return made((void *)out, size, rank, &id); }
int ncclCommInitRankConfig(void **out, int size, unique_id id, int rank, void *how) {
  return made((void *)out, size, rank, &id);
}
int ncclCommInitRankScalable(void **out, int size, int rank, int count, unique_id *ids, void *how) {
  return made((void *)out, size, rank, ids);
}
int ncclCommCount(struct communicator *c, int *size) { *size = c->size; return 0; }
int ncclCommUserRank(struct communicator *c, int *rank) { *rank = c->rank; return 0; }
int ncclCommGetAsyncError(struct communicator *c, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int error) { return "an error of the stand-in"; }
const char *ncclGetLastError(struct communicator *c) { return ""; }

/* Bytes from rank to rank. */

static void put(const char *path, const void *from, size_t size) {
  char draft[PATH + 2];
  snprintf(draft, sizeof draft, "%s~", path);
  int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  for (size_t done = 0; done < size;) {
    ssize_t more = write(file, (const char *)from + done, size - done);
    if (more <= 0) give_up("no file in memory can be written");
    done += (size_t)more;
  }
  close(file);
  if (rename(draft, path)) give_up("no file in memory can be written");
}

static void get(const char *path, void *to, size_t size) {
  struct stat told;
  int file = open(path, O_RDONLY);
  if (file < 0 || fstat(file, &told)) give_up("what a member gave is gone");
  if ((size_t)told.st_size != size) give_up("members of a group, or the ends of a message, have unlike sizes");
  for (size_t done = 0; done < size;) {
    ssize_t more = read(file, (char *)to + done, size - done);
    if (more <= 0) give_up("what a member gave cannot be read");
    done += (size_t)more;
  }
  close(file);
}

static void path_of(char *path, struct communicator *c, int rank) {
  snprintf(path, PATH, "/dev/shm/stand-in-%s-%ld-%d", c->id, c->collectives, rank);
}

static void show(struct communicator *c, const void *from, size_t size) {
  char path[PATH];
  path_of(path, c, c->rank);
  put(path, from, size);
  meet(c);
}

static void see(struct communicator *c, int rank, void *to, size_t size) {
  char path[PATH];
  path_of(path, c, rank);
  get(path, to, size);
}

static int over(struct communicator *c) {
  char path[PATH];
  meet(c);
  path_of(path, c, c->rank);
  unlink(path);
  c->collectives++;
  return 0;
}

/* Of a color -1 is the member in no part. */
int ncclCommSplit(struct communicator *c, int color, int key, struct communicator **out, void *how) {
  int theirs[2], mine[2] = {color, key}, size = 0, rank = 0, byte;
  unique_id id;
  for (int i = 0; i < ID_BYTES; i++) {
    sscanf(c->id + 2 * i, "%2x", &byte);
    id.bytes[i] = (unsigned char)(byte ^ (i < 4 ? color >> 8 * i : i < 8 ? c->collectives + 1 >> 8 * (i - 4) : 0));
  }
  show(c, mine, sizeof mine);
  for (int r = 0; r < c->size; r++) {
    see(c, r, theirs, sizeof theirs);
    if (theirs[0] != color) continue;
    size++;
    rank += theirs[1] < key || (theirs[1] == key && r < c->rank);
  }
  over(c);
  *out = NULL;
  return color < 0 ? 0 : made(out, size, rank, &id);
}

/* Collectives. */

static double number(const void *from, int type, size_t i) {
  uint32_t bits;
  float value;
  switch (type) {
    case INT8: return ((const int8_t *)from)[i];
    case UINT8: return ((const uint8_t *)from)[i];
    case INT32: return ((const int32_t *)from)[i];
    case FLOAT32: return ((const float *)from)[i];
    case FLOAT64: return ((const double *)from)[i];
    case BFLOAT16:
      bits = (uint32_t)((const uint16_t *)from)[i] << 16;
      memcpy(&value, &bits, sizeof value);
      return value;
    default: give_up("a reduction of a type that is not stood in for");
  }
}

static void set_number(void *to, int type, size_t i, double given) {
  uint32_t bits;
  float value = (float)given;
  switch (type) {
    case INT8: ((int8_t *)to)[i] = (int8_t)given; return;
    case UINT8: ((uint8_t *)to)[i] = (uint8_t)given; return;
    case INT32: ((int32_t *)to)[i] = (int32_t)given; return;
    case FLOAT32: ((float *)to)[i] = value; return;
    case FLOAT64: ((double *)to)[i] = given; return;
    default: /* BFLOAT16, to the nearest, of two to the even one */
      memcpy(&bits, &value, sizeof bits);
      ((uint16_t *)to)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

static double joined(int how, double one, double other) {
  switch (how) {
    case SUM:
    case MEAN: return one + other;
    case MOST: return one > other ? one : other;
    case LEAST: return one < other ? one : other;
    default: give_up("a reduction that is not stood in for");
  }
}

static int64_t whole(int how, int64_t one, int64_t other) {
  if (how == PRODUCT || how == MEAN) give_up("a reduction of whole numbers that is not stood in for");
  return how == SUM ? one + other : (how == MOST) == (one > other) ? one : other;
}

/* Elements `first` to `first + count` of what all have shown, reduced in the order of ranks. */
static void reduce(struct communicator *c, void *to, size_t first, size_t count, size_t shown, int type, int how) {
  char *theirs = malloc(shown * size_of(type) + 1);
  double *sums = calloc(count + 1, sizeof *sums);
  for (int rank = 0; rank < c->size; rank++) {
    see(c, rank, theirs, shown * size_of(type));
    for (size_t i = 0; i < count; i++) {
      if (type == INT64) {
        int64_t more = ((int64_t *)theirs)[first + i];
        ((int64_t *)to)[i] = rank ? whole(how, ((int64_t *)to)[i], more) : more;
        continue;
      }
      double more = number(theirs, type, first + i);
      sums[i] = rank ? joined(how, sums[i], more) : more;
    }
  }
  double over = how == MEAN ? c->size : 1;
  for (size_t i = 0; type != INT64 && i < count; i++) set_number(to, type, i, sums[i] / over);
  free(sums);
  free(theirs);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int how, struct communicator *c, void *stream) {
  show(c, from, count * size_of(type));
  reduce(c, to, 0, count, count, type, how);
  return over(c);
}

int ncclReduce(
    const void *from, void *to, size_t count, int type, int how, int root, struct communicator *c, void *stream) {
  show(c, from, count * size_of(type));
  if (c->rank == root) reduce(c, to, 0, count, count, type, how);
  return over(c);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int how, struct communicator *c, void *stream) {
  show(c, from, count * size_of(type) * (size_t)c->size);
  reduce(c, to, count * (size_t)c->rank, count, count * (size_t)c->size, type, how);
  return over(c);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *c, void *stream) {
  size_t size = count * size_of(type);
  show(c, from, size);
  for (int rank = 0; rank < c->size; rank++) see(c, rank, (char *)to + (size_t)rank * size, size);
  return over(c);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *c, void *stream) {
  size_t size = count * size_of(type);
  show(c, c->rank == root ? from : to, size);
  see(c, root, to, size);
  return over(c);
}

int ncclBcast(void *at, size_t count, int type, int root, struct communicator *c, void *stream) {
  return ncclBroadcast(at, at, count, type, root, c, stream);
}

/* Messages. */

static void message_path(char *path, struct communicator *c, int from, int to, long number) {
  snprintf(path, PATH, "/dev/shm/stand-in-%s-%d-to-%d-%ld", c->id, from, to, number);
}

int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *c, void *stream) {
  char path[PATH];
  message_path(path, c, c->rank, peer, c->sent[peer]++);
  put(path, from, count * size_of(type));
  return 0;
}

static void *arrive(void *given) {
  struct receive *it = given;
  for (long us = 0; access(it->path, F_OK); us += LOOK_US) {
    if (us > PATIENCE_US) give_up("a message never came");
    usleep(LOOK_US);
  }
  get(it->path, it->to, it->size);
  unlink(it->path);
  __sync_synchronize();
  it->pending.is_over = 1;
  return NULL;
}

int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *c, void *stream) {
  struct receive *it = calloc(1, sizeof *it);
  pthread_t thread;
  it->to = to;
  it->size = count * size_of(type);
  message_path(it->path, c, peer, c->rank, c->received[peer]++);
  begin(stream, &it->pending);
  if (pthread_create(&thread, NULL, arrive, it)) give_up("no thread can be started");
  pthread_detach(thread);
  return 0;
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *c, void *stream) {
  size_t size = count * size_of(type);
  for (int rank = 0; rank < c->size; rank++) ncclSend((const char *)from + (size_t)rank * size, count, type, rank, c, stream);
  for (int rank = 0; rank < c->size; rank++) ncclRecv((char *)to + (size_t)rank * size, count, type, rank, c, stream);
  return 0;
}
