// Fibers: a stack, a context switch in assembly that takes a few ns, and the sanitizers'
// annotations.  HOST_ASAN and HOST_TSAN: the kernels are instrumented.  The runtime never is.
#pragma once
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#ifdef HOST_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
void __asan_poison_memory_region(const volatile void*, size_t);
void __asan_unpoison_memory_region(const volatile void*, size_t);
}
#define ASAN(...) __VA_ARGS__
constexpr size_t kRedzone = 128;  // around every shared array
#else
#define ASAN(...)
constexpr size_t kRedzone = 0;
#endif

#if defined(HOST_ASAN) || defined(HOST_TSAN)  // their kernels are not optimized
constexpr size_t kStackBytes = 512 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif

#ifdef HOST_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned flags);
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define TSAN(...) __VA_ARGS__
constexpr unsigned kNoSync = 1;  // a switch does not order memory: only barriers do
#else
#define TSAN(...)
#endif

// In this scope the runtime's accesses on behalf of a kernel neither order memory nor race.
static thread_local int unobserved_depth;

inline void begin_unobserved() {
    ++unobserved_depth;
    TSAN(AnnotateIgnoreReadsBegin(__FILE__, __LINE__));
    TSAN(AnnotateIgnoreWritesBegin(__FILE__, __LINE__));
}
inline void end_unobserved() {
    TSAN(AnnotateIgnoreWritesEnd(__FILE__, __LINE__));
    TSAN(AnnotateIgnoreReadsEnd(__FILE__, __LINE__));
    --unobserved_depth;
}
struct Unobserved {
    Unobserved() { begin_unobserved(); }
    ~Unobserved() { end_unobserved(); }
};

// Saves the callee-saved registers on the stack and its pointer in *from, then continues with `to`.
extern "C" void cupykern_switch(void** from, void* to) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(R"(
.text
.globl cupykern_switch
.hidden cupykern_switch
.type cupykern_switch, @function
cupykern_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cupykern_switch, . - cupykern_switch
)");
constexpr int kSavedWords = 8;  // six registers, the return address and a word for alignment
constexpr int kReturnWord = 6;

// Flushes FP32 subnormals to zero, both operands and results.
static void flush_subnormals() {
    const unsigned mxcsr = 0x1f80 | 0x8000 | 0x0040;
    asm volatile("ldmxcsr %0" ::"m"(mxcsr));
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl cupykern_switch
.hidden cupykern_switch
.type cupykern_switch, %function
cupykern_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cupykern_switch, . - cupykern_switch
)");
constexpr int kSavedWords = 20;
constexpr int kReturnWord = 11;

static void flush_subnormals() {
    unsigned long long fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr));
    asm volatile("msr fpcr, %0" ::"r"(fpcr | 1ull << 24));
}
#else
#error "the host target is for x86-64 and aarch64"
#endif

namespace host {
namespace {

// The context of a fiber, or of a worker's own stack.
struct Context {
    void* stack_pointer;
    char* bottom;  // the stack's
    size_t size;
    ASAN(void* fake_stack;)
    TSAN(void* tsan_fiber;)
};

// Called when a context first runs.
inline void enter_context() { ASAN(__sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr)); }

inline void switch_context(Context& from, Context& to) {
    ASAN(__sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size));
    TSAN(__tsan_switch_to_fiber(to.tsan_fiber, kNoSync));
    cupykern_switch(&from.stack_pointer, to.stack_pointer);
    ASAN(__sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr));
}

constexpr unsigned long long kCanary = 0x5ca1ab1e0ddba11ull;

// Resets `c`, whose stack is set, to start at `main`.
inline void reset_context(Context& c, void (*main)()) {
    ASAN(__asan_unpoison_memory_region(c.bottom, c.size));
    ASAN(c.fake_stack = nullptr);
    TSAN(if (c.tsan_fiber) __tsan_destroy_fiber(c.tsan_fiber));
    TSAN(c.tsan_fiber = __tsan_create_fiber(0));
    memcpy(c.bottom, &kCanary, sizeof(kCanary));
    void** top = reinterpret_cast<void**>(c.bottom + c.size);
    void** saved = top - kSavedWords;
    memset(saved, 0, kSavedWords * sizeof(void*));
    saved[kReturnWord] = reinterpret_cast<void*>(main);
    c.stack_pointer = saved;
}

inline bool stack_overflowed(const Context& c) { return memcmp(c.bottom, &kCanary, 8) != 0; }

// Bytes from one fiber's stack to the next.  The stacks' tops lie in different cache sets: with a
// power of two as stride, the hot lines of all fibers would be in the same set.
constexpr size_t kStackStride = kStackBytes + 9 * 64;

inline char* allocate_stacks(size_t count) {
    void* p = mmap(nullptr, count * kStackStride, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

}  // namespace
}  // namespace host
