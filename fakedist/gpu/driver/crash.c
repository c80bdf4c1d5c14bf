/* A crash inside the library names the call in one line on stderr. Then the previous handler takes over. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction before[4];
static void *own_base;
static char stack[1 << 16]; /* the handler's, in case the script's has overflowed */

/* The exported function of this library that contains an address, or NULL. A helper has no name, but its caller does. */
static const char *call_at(void *address) {
    Dl_info found;
    const Elf64_Sym *symbol = NULL;
    if (!dladdr1(address, &found, (void **)&symbol, RTLD_DL_SYMENT) || found.dli_fbase != own_base) return NULL;
    if (!found.dli_sname || !symbol) return NULL;
    return (char *)address - (char *)found.dli_saddr < (long)symbol->st_size ? found.dli_sname : NULL;
}

static void say(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void crashed(int number, siginfo_t *info, void *context) {
    void *frames[64];
    const char *call = NULL;
    (void)context;
    for (int i = 0, n = backtrace(frames, 64); i < n && !call; i++) call = call_at(frames[i]);
    if (call) {
        say("fakedist: crash inside of ");
        say(call);
        say(", as the virtual GPU answers it\n");
    }
    for (int i = 0; i < 4; i++)
        if (signals[i] == number) sigaction(number, &before[i], NULL);
    /* On return the instruction runs again under the previous handler. A signal that was sent is sent again. */
    if (info->si_code <= 0) raise(number);
}

API void fakedist_name_crashes(void) {
    struct sigaction ours = {.sa_sigaction = crashed, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    stack_t alternative = {.ss_sp = stack, .ss_size = sizeof stack};
    Dl_info own;
    void *frames[1];
    stack_t now;
    if (dladdr((void *)fakedist_name_crashes, &own)) own_base = own.dli_fbase;
    backtrace(frames, 1); /* loads what it needs now: a handler must not allocate */
    if (!sigaltstack(NULL, &now) && (now.ss_flags & SS_DISABLE)) sigaltstack(&alternative, NULL);
    for (int i = 0; i < 4; i++) sigaction(signals[i], &ours, &before[i]);
}
