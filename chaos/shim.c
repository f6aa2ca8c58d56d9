/* Count the file operations under one folder: the n-th kills the process, or fails, or all are
   recorded with their data. Loaded by LD_PRELOAD; inactive until `chaos_arm` is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))
#define LONG_PATH (2 * PATH_MAX)

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static size_t length;                  /* of `folder`; 0: inactive */
static long count, first, last, until; /* operations; failures end after `until` deletions */
static int action, book = -1;          /* -1 kills, above 0 is an errno; the file of the recording */

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void chaos_arm(const char *path, long from, long to, int what, long deletions, int log) {
  snprintf(folder, sizeof folder, "%s", path);
  count = 0, first = from, last = to, action = what, until = deletions, book = log;
  length = strlen(folder);
}

void chaos_disarm(void) { length = 0; }

long chaos_count(void) { return count; }

static void note(const char *what, long inode, long at, const void *data, size_t size,
                 const char *path, const char *other) {
  if (book < 0) return;
  dprintf(book, "%s\t%ld\t%ld\t%zu\t%s\t%s\n", what, inode, at, size, path, other);
  for (size_t done = 0; done < size;) {
    ssize_t more = REAL(write)(book, (const char *)data + done, size - done);
    if (more <= 0) abort();
    done += more;
  }
}

void chaos_mark(long number) {
  pthread_mutex_lock(&one);
  note("mark", number, 0, "", 0, "", "");
  pthread_mutex_unlock(&one);
}

static int inside(const char *path) {
  return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int opened(int file, char *path) { /* return whether the file lies in the folder, and its path */
  char link[64];
  if (!length) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return inside(path);
}

static int named(int at, const char *name, char *path) {
  char start[PATH_MAX] = "";
  if (!length) return 0;
  if (name[0] != '/' && at == AT_FDCWD && !getcwd(start, sizeof start)) return 0;
  if (name[0] != '/' && at != AT_FDCWD && !opened(at, start)) return 0;
  snprintf(path, LONG_PATH, "%s%s%s", start, *start ? "/" : "", name);
  return inside(path);
}

static int enter(int deletes) { /* return whether the operation is allowed; then the lock is held */
  pthread_mutex_lock(&one);
  if (deletes && action > 0) { /* a full disk allows deletions, which free space */
    if (until > 0 && --until == 0) action = 0;
    return 1;
  }
  long now = ++count;
  if (!action || now < first || now > last) return 1;
  if (action < 0)
    for (;;) kill(getpid(), SIGKILL);
  pthread_mutex_unlock(&one);
  errno = action;
  return 0;
}

static long leave(long result) {
  int error = errno;
  pthread_mutex_unlock(&one);
  errno = error;
  return result;
}

static long inode(const char *path) {
  struct stat found;
  return lstat(path, &found) ? -1 : (long)found.st_ino;
}

static long inode_of(int file) {
  struct stat found;
  return fstat(file, &found) ? -1 : (long)found.st_ino;
}

int openat(int at, const char *name, int flags, ...) {
  char path[LONG_PATH];
  va_list more;
  va_start(more, flags);
  int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;
  va_end(more);
  if (!(flags & (O_CREAT | O_TRUNC)) || !named(at, name, path))
    return REAL(openat)(at, name, flags, mode);
  long before = inode(path);
  if (before >= 0 && !(flags & O_TRUNC)) return REAL(openat)(at, name, flags, mode);
  if (!enter(0)) return -1;
  int file = REAL(openat)(at, name, flags, mode);
  if (file >= 0) note(before < 0 ? "create" : "cut", inode_of(file), 0, "", 0, path, "");
  return leave(file);
}

#define OPEN(name, at, ...)                                                      \
  int name(__VA_ARGS__ const char *path, int flags, ...) {                       \
    va_list more;                                                                \
    va_start(more, flags);                                                       \
    int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;          \
    va_end(more);                                                                \
    return openat(at, path, flags, mode);                                        \
  }
OPEN(open, AT_FDCWD, )
OPEN(open64, AT_FDCWD, )
OPEN(openat64, at, int at, )

ssize_t write(int file, const void *data, size_t size) {
  char path[PATH_MAX];
  if (!opened(file, path)) return REAL(write)(file, data, size);
  if (!enter(0)) return -1;
  int end = fcntl(file, F_GETFL) & O_APPEND;
  long at = lseek(file, 0, end ? SEEK_END : SEEK_CUR);
  ssize_t done = REAL(write)(file, data, size);
  if (done > 0) note("write", inode_of(file), at, data, done, path, "");
  return leave(done);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
  char path[PATH_MAX];
  if (!opened(file, path)) return REAL(pwrite64)(file, data, size, at);
  if (!enter(0)) return -1;
  ssize_t done = REAL(pwrite64)(file, data, size, at);
  if (done > 0) note("write", inode_of(file), at, data, done, path, "");
  return leave(done);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
  return pwrite64(file, data, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
  char path[PATH_MAX];
  if (!opened(file, path)) return REAL(writev)(file, parts, number);
  if (!enter(0)) return -1;
  long at = lseek(file, 0, SEEK_CUR);
  ssize_t done = REAL(writev)(file, parts, number);
  for (ssize_t left = done; left > 0 && number--; parts++) {
    ssize_t size = left < (ssize_t)parts->iov_len ? left : (ssize_t)parts->iov_len;
    note("write", inode_of(file), at, parts->iov_base, size, path, "");
    at += size, left -= size;
  }
  return leave(done);
}

static int synced(int file, int (*how)(int)) {
  char path[PATH_MAX];
  if (!opened(file, path)) return how(file);
  if (!enter(0)) return -1;
  int result = how(file);
  if (!result) note("sync", inode_of(file), 0, "", 0, path, "");
  return leave(result);
}

int fsync(int file) { return synced(file, REAL(fsync)); }
int fdatasync(int file) { return synced(file, REAL(fdatasync)); }

int ftruncate64(int file, off64_t size) {
  char path[PATH_MAX];
  if (!opened(file, path)) return REAL(ftruncate64)(file, size);
  if (!enter(0)) return -1;
  int result = REAL(ftruncate64)(file, size);
  if (!result) note("cut", inode_of(file), size, "", 0, path, "");
  return leave(result);
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int mkdirat(int at, const char *name, mode_t mode) {
  char path[LONG_PATH];
  if (!named(at, name, path) || inode(path) >= 0) return REAL(mkdirat)(at, name, mode);
  if (!enter(0)) return -1;
  int result = REAL(mkdirat)(at, name, mode);
  if (!result) note("mkdir", inode(path), 0, "", 0, path, "");
  return leave(result);
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int renameat2(int at, const char *name, int to, const char *other, unsigned flags) {
  char path[LONG_PATH], new[LONG_PATH];
  if (!named(at, name, path) || !named(to, other, new))
    return REAL(renameat2)(at, name, to, other, flags);
  if (!enter(0)) return -1;
  int result = REAL(renameat2)(at, name, to, other, flags);
  if (!result) note("rename", inode(new), 0, "", 0, path, new);
  return leave(result);
}

int renameat(int at, const char *name, int to, const char *other) {
  return renameat2(at, name, to, other, 0);
}

int rename(const char *name, const char *other) {
  return renameat2(AT_FDCWD, name, AT_FDCWD, other, 0);
}

int unlinkat(int at, const char *name, int flags) {
  char path[LONG_PATH];
  if (!named(at, name, path) || inode(path) < 0) return REAL(unlinkat)(at, name, flags);
  if (!enter(1)) return -1;
  int result = REAL(unlinkat)(at, name, flags);
  if (!result) note("remove", 0, 0, "", 0, path, "");
  return leave(result);
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
