// Threads for work that comes in short pieces, one after the other: a token of decode.
//   together(threads, [&](Member me) { ... me.wait(); ... });     // me.mine of me.of; all meet at wait()
// While a decode goes on (expect() starts it) these are the threads of team.cpp, else OpenMP's. How many there are
// may change from call to call, so no number may depend on it.
#pragma once

#include <omp.h>

extern "C" {
struct Team {  // the functions of team.cpp: a library that is loaded by itself finds them by join_team
    bool (*run)(int threads, void (*work)(const void* what, int mine, int of), const void* what);  // false: OpenMP shall
    void (*meet)();
    void (*expect)();
};
}

inline const Team* our_team = nullptr;

extern "C" inline __attribute__((used)) void join_team(const Team* team) { our_team = team; }

struct Member {
    int mine, of;
    bool ours;  // of our own team, not OpenMP's

    void wait() const {
        if (of == 1) return;
        if (ours) return our_team->meet();
#pragma omp barrier
    }
    // body(i) for this member's share of 0 .. count
    template <class Body>
    void each(long count, Body body) const {
        for (long i = count * mine / of; i < count * (mine + 1) / of; i++) body(i);
    }
};

template <class Body>
void together(int threads, const Body& body) {
    const auto work = [](const void* what, int mine, int of) { (*(const Body*)what)(Member{mine, of, true}); };
    if (our_team && our_team->run(threads, work, &body)) return;
#pragma omp parallel num_threads(threads)
    body(Member{omp_get_thread_num(), omp_get_num_threads(), false});
}

// More work of this kind comes within milliseconds.
inline void expect_more() {
    if (our_team) our_team->expect();
}
