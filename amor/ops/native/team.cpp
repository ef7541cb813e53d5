// The threads of team.h. Between two pieces of work they look for the next one in place, which on a quiet machine is the
// fastest: to wake a thread takes as long as a piece. A thread that finds that it did not run for a while, or waits long for
// another, has met a program that wants its core. Then there is one thread fewer for some time, so that nobody waits for a
// thread that does not run, and nobody keeps a core by waiting.
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Time = long;  // nanoseconds
constexpr Time MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND;
constexpr Time LINGER = 5 * MILLISECOND;   // after a piece: the next one comes by then
constexpr Time LOST = 1 * MILLISECOND;     // not run for so long: somebody else had the core
constexpr Time YIELD = 20 * MICROSECOND;   // between two offers of the core to whoever else wants it
constexpr Time UNEVEN = 4;                 // members are done within this part of each other's time
constexpr int AMENDS = 4;                  // times what was lost is gone on with fewer threads

Time now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void turn() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that one thread sets and others wait for.
struct alignas(64) Signal {
    std::atomic<long> value{0};
    std::atomic<int> asleep{0};
    std::mutex mutex;
    std::condition_variable woken;

    void set(long to) {
        value.store(to);
        if (!asleep.load()) return;
        std::lock_guard<std::mutex> lock(mutex);
        woken.notify_all();
    }
    void sleep_while(long old) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);
        woken.wait(lock, [&] { return value.load() != old; });
        asleep.fetch_sub(1);
    }
};

thread_local Time met_at = 0;  // when this thread began a piece, or met the others in it

struct Threads {
    std::vector<Signal*> calls;         // of each thread but the caller's: the number of the piece it shall work on
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    void (*work)(const void*, int, int) = nullptr;
    const void* what = nullptr;
    Signal passed;                      // how often all have met
    std::atomic<int> of{1}, arrived{0}, fewer{0};
    std::atomic<Time> lingers{0}, amended{0};  // until when

    void expect() { lingers.store(now() + LINGER); }
    void lose(Time lost) {
        if (fewer.load() < of - 1) fewer.fetch_add(1);
        amended.store(now() + AMENDS * lost);
    }
    // Look at a signal until it is not `old`, in place for as long as `patient(now)` says, then asleep.
    template <class Patient>
    void wait(Signal& signal, long old, Patient patient) {
        Time offered = 0;
        for (;;) {
            for (int i = 0; i < 64; i++) {
                if (signal.value.load(std::memory_order_acquire) != old) return;
                turn();
            }
            const Time time = now();
            if (!patient(time)) return signal.sleep_while(old);
            if (time - offered < YIELD) continue;
            if (offered) sched_yield();
            offered = time;
        }
    }
    void meet() {
        const long met = passed.value.load();
        const Time began = now(), patience = std::max(LOST, (began - met_at) / UNEVEN);
        if (arrived.fetch_add(1) + 1 == of) {
            arrived.store(0);
            passed.set(met + 1);
        } else {
            wait(passed, met, [&](Time time) { return time - began < patience; });
        }
        met_at = now();
        if (met_at - began > patience) lose(met_at - began);
    }
    void live(int mine, Signal* call) {
        for (long done = 0;; done++) {
            wait(*call, done, [&, last = Time(0)](Time time) mutable {
                if (last && time - last > LOST) lose(time - last);
                last = time;
                return time < lingers.load();
            });
            met_at = now();
            work(what, mine, of);
            meet();
        }
    }
    bool run(int threads, void (*some_work)(const void*, int, int), const void* with) {
        const Time time = now();
        if (time >= lingers.load() || taken.test_and_set()) return false;
        if (fewer.load() && time >= amended.load()) {
            fewer.fetch_sub(1);
            amended.store(time + LINGER);
        }
        const int team = threads > fewer.load() + 1 ? threads - fewer.load() : 1;
        work = some_work, what = with, of = team;
        for (int i = (int)calls.size(); i < team - 1; i++) {
            calls.push_back(new Signal);
            std::thread(&Threads::live, this, i + 1, calls.back()).detach();
        }
        for (int i = 0; i < team - 1; i++) calls[i]->set(calls[i]->value.load() + 1);
        met_at = time;
        work(what, 0, team);
        if (team > 1) meet();
        expect();
        taken.clear();
        return true;
    }
};

// Never deleted: threads live as long as the process. A child of fork has none of them, and makes its own.
Threads* threads_here() {
    static Threads* here = nullptr;
    static std::once_flag once;
    std::call_once(once, [] {
        here = new Threads;
        pthread_atfork(nullptr, nullptr, [] { here = new Threads; });
    });
    return here;
}

bool run(int threads, void (*work)(const void*, int, int), const void* what) { return threads_here()->run(threads, work, what); }
void meet() { threads_here()->meet(); }
void expect() { threads_here()->expect(); }

}  // namespace

extern "C" const Team* team() {
    static const Team functions{run, meet, expect};
    return &functions;
}
