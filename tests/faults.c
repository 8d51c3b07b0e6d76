/* A file system that fails or is slow, as a library to preload: calls about paths that contain a text do what the file
   FAULTS says: "<errno> <milliseconds> <text>"; errno 0 only waits. Without the file all is well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(const char *path) {
  char text[256], part[200];
  int code = 0, wait = 0, file = syscall(SYS_openat, AT_FDCWD, getenv("FAULTS"), O_RDONLY);
  if (file < 0) return 0;
  long size = syscall(SYS_read, file, text, sizeof text - 1);
  syscall(SYS_close, file);
  text[size > 0 ? size : 0] = 0;
  if (sscanf(text, "%d %d %199s", &code, &wait, part) != 3 || !strstr(path, part)) return 0;
  usleep(1000 * wait);
  errno = code;
  return code;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                          \
  int name(const char *path, int flags, ...) {              \
    va_list more;                                           \
    va_start(more, flags);                                  \
    mode_t mode = va_arg(more, mode_t);                     \
    va_end(more);                                           \
    return fails(path) ? -1 : REAL(name)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) { return fails(to) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }

ssize_t write(int file, const void *bytes, size_t size) {
  char link[32], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  long length = readlink(link, path, sizeof path - 1);
  path[length > 0 ? length : 0] = 0;
  return fails(path) ? -1 : REAL(write)(file, bytes, size);
}
