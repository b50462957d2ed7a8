/* Preloaded library that makes the n-th file-system call under a folder fail, or ends the process
 * before or after it. See test_faults_of_calls.py. The headers of the calls that it defines are not
 * included, because their prototypes differ. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { FAIL = 1, FAIL_ON, KILL_BEFORE, KILL_AFTER, SHORT };
struct seen { int calls; char where[512]; };
static struct seen *seen; /* shared with the parent process, which reads it after this process has ended */
static char folder[4096];
static int armed, at, action, error;

long readlink(const char *, char *, unsigned long);
int dirfd(void *);
void _exit(int);

__attribute__((constructor)) static void begin(void) {
    seen = mmap(0, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void arm(const char *under, int call, int what, int number) {
    snprintf(folder, sizeof folder, "%s", under);
    memset(seen, 0, sizeof *seen);
    at = call, action = what, error = number, armed = 1;
}
void disarm(void) { armed = 0; }
int calls(void) { return seen->calls; }
const char *where(void) { return seen->where; }

/* The action at this call, 0 for none. `name` is null or relative to the folder `descriptor`. */
static int what(const char *call, int descriptor, const char *name) {
    char path[4096] = "", link[64];
    if (!armed) return 0;
    if (descriptor >= 0 && (!name || name[0] != '/')) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        if (readlink(link, path, sizeof path - 1) < 0) return 0;
        if (name) strcat(strcat(path, "/"), name);
    } else if (name) snprintf(path, sizeof path, "%s", name);
    if (strncmp(path, folder, strlen(folder))) return 0;
    int number = __atomic_add_fetch(&seen->calls, 1, __ATOMIC_SEQ_CST);
    if (number < at || (number > at && action != FAIL_ON)) return 0;
    if (number == at) snprintf(seen->where, sizeof seen->where, "%s %s", call, path + strlen(folder));
    if (action == KILL_BEFORE) _exit(137);
    errno = error;
    return action;
}

#define CALL(type, name, descriptor, path, given, passed, failed, shortened)                 \
    type name given {                                                                         \
        static type(*real) given;                                                             \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                            \
        int now = what(#name, descriptor, path);                                              \
        if (now == FAIL || now == FAIL_ON) return failed;                                     \
        if (now == SHORT) { shortened; }                                                      \
        type result = real passed;                                                            \
        if (now == KILL_AFTER) _exit(137);                                                    \
        return result;                                                                        \
    }
#define FD(type, name, given, passed) CALL(type, name, fd, 0, given, passed, -1, )
#define DATA(name, given, passed) CALL(long, name, fd, 0, given, passed, -1, n = n / 2 + n % 2)
#define PATH(name, given, passed) CALL(int, name, -1, p, given, passed, -1, )
#define AT(name, given, passed) CALL(int, name, d, p, given, passed, -1, )
PATH(open, (const char *p, int f, int m), (p, f, m))
PATH(open64, (const char *p, int f, int m), (p, f, m))
AT(openat, (int d, const char *p, int f, int m), (d, p, f, m))
AT(openat64, (int d, const char *p, int f, int m), (d, p, f, m))
DATA(write, (int fd, const void *b, unsigned long n), (fd, b, n))
DATA(read, (int fd, void *b, unsigned long n), (fd, b, n))
DATA(pwrite64, (int fd, const void *b, unsigned long n, long o), (fd, b, n, o))
FD(int, fsync, (int fd), (fd))
FD(int, flock, (int fd, int o), (fd, o))
FD(int, ftruncate64, (int fd, long n), (fd, n))
FD(int, fstat64, (int fd, void *s), (fd, s))
PATH(truncate64, (const char *p, long n), (p, n))
PATH(rename, (const char *p, const char *q), (p, q))
PATH(unlink, (const char *p), (p))
AT(unlinkat, (int d, const char *p, int f), (d, p, f))
PATH(rmdir, (const char *p), (p))
PATH(mkdir, (const char *p, int m), (p, m))
PATH(link, (const char *p, const char *q), (p, q))
PATH(symlink, (const char *q, const char *p), (q, p))
PATH(stat64, (const char *p, void *s), (p, s))
PATH(lstat64, (const char *p, void *s), (p, s))
AT(fstatat64, (int d, const char *p, void *s, int f), (d, p, s, f))
CALL(void *, opendir, -1, p, (const char *p), (p), 0, )
CALL(void *, fdopendir, fd, 0, (int fd), (fd), 0, )
CALL(void *, readdir64, dirfd(dir), 0, (void *dir), (dir), 0, )
/* A failing close still closes the file. Buffered output of C does not call `write`. */
CALL(int, close, fd, 0, (int fd), (fd), (real(fd), errno = error, -1), )
CALL(size_t, fwrite, fileno(f), 0, (const void *b, size_t s, size_t n, FILE *f), (b, s, n, f), 0, n /= 2)
