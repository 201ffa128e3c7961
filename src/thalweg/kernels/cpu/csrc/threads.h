// Work in parts, shared with threads that sleep when there is none.
//
// Why not OpenMP: its threads do not survive a fork after first use, spin while they wait (four processes on two cores
// then spend their time waiting for one another), and torch brings a runtime of its own that ours would stand beside.
#pragma once

#include <cstdint>

namespace thalweg {

// Calls `part(context, k)` for every k < count, by this thread and at most `threads` - 1 others; returns when all are
// done. Parts are taken in order by whoever is free, so a thread that gets no core delays nothing. A part must not
// depend on who takes it. Where the threads are busy with another call (of another Python thread, or one further out
// on this stack) this thread does it all. The first exception of a part is thrown here, after those begun have ended.
void share(int64_t count, int threads, void (*part)(void*, int64_t), void* context);

template <class Function>
inline void share(int64_t count, int threads, Function&& function) {
    share(count, threads, [](void* context, int64_t k) { (*static_cast<Function*>(context))(k); }, &function);
}

// Into how many parts work of `operations` over `items` is cut: enough that threads which end at different times wait
// little, and one where waking a thread would cost more than it saves. Depends on nothing but its arguments.
int64_t parts_of(double operations, int64_t items, int threads);
double set_least_operations(double operations);  // of a part, for tests that share out small work; returns what it was

// Calls `range(low, high)` for items low..high - 1 of each of these parts.
template <class Function>
inline void share_out(double operations, int64_t items, int threads, Function&& range) {
    const int64_t parts = parts_of(operations, items, threads);
    share(parts, threads, [&](int64_t part) { range(items * part / parts, items * (part + 1) / parts); });
}

// Memory of this thread for the part it works on, 64-byte aligned and uninitialised, until it asks again; kept between
// calls where it is not much, since fresh pages cost more than many a kernel.
void* scratch(int64_t bytes);

}  // namespace thalweg
