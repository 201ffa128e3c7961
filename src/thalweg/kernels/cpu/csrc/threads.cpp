#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace thalweg {
namespace {

constexpr int MOST_THREADS = 256;
std::atomic<double> least_operations{1e5};  // a part of less is not worth a thread that must wake up
constexpr int PARTS_OF_A_THREAD = 4;
// How often a thread offers its core to others before it sleeps: some tens of microseconds where nobody wants the core.
constexpr int YIELDS = 100;

struct Job {
    void (*part)(void*, int64_t);
    void* context;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::mutex failing{};
    std::exception_ptr failure{};

    void work() {
        for (;;) {
            const int64_t k = next.fetch_add(1, std::memory_order_relaxed);
            if (k >= count) return;
            try {
                part(context, k);
            } catch (...) {
                std::lock_guard<std::mutex> lock(failing);
                if (!failure) failure = std::current_exception();
            }
        }
    }
};

class Pool {
  public:
    void run(Job& job, int helpers) {
        if (busy_.exchange(true, std::memory_order_acquire)) return job.work();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (threads_ < helpers && start()) {
            }
            job_ = &job;
            wanted_ = std::min(helpers, threads_);
            tickets_.fetch_add(1, std::memory_order_release);
        }
        for (int k = 0; k < helpers; ++k) wake_.notify_one();
        job.work();
        finish();
        busy_.store(false, std::memory_order_release);
    }

  private:
    bool start() {
        if (threads_ >= MOST_THREADS) return false;
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {  // no more threads are to be had: fewer will do
            return false;
        }
        ++threads_;
        return true;
    }

    void serve() {
        for (uint64_t seen = 0;;) {
            for (int k = 0; k < YIELDS && tickets_.load(std::memory_order_acquire) == seen; ++k) std::this_thread::yield();
            Job* job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return tickets_.load(std::memory_order_relaxed) != seen; });
                seen = tickets_.load(std::memory_order_relaxed);
                if (!job_ || !wanted_) continue;
                job = job_;
                --wanted_;
                inside_.fetch_add(1, std::memory_order_relaxed);
            }
            job->work();
            if (inside_.fetch_sub(1, std::memory_order_release) == 1) {
                std::lock_guard<std::mutex> lock(mutex_);
                left_.notify_one();
            }
        }
    }

    // No thread enters the job any more, and those inside have left it.
    void finish() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = nullptr;
        }
        for (int k = 0; k < YIELDS && inside_.load(std::memory_order_acquire); ++k) std::this_thread::yield();
        if (!inside_.load(std::memory_order_acquire)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        left_.wait(lock, [&] { return !inside_.load(std::memory_order_acquire); });
    }

    std::atomic<bool> busy_{false};
    std::atomic<uint64_t> tickets_{0};
    std::atomic<int> inside_{0};
    std::mutex mutex_;
    std::condition_variable wake_, left_;
    Job* job_ = nullptr;
    int wanted_ = 0, threads_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends. A child of a fork has none of them, and perhaps a
// lock that nobody will open: it begins with a new one.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    static const bool once = [] {
        pool = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
        return true;
    }();
    (void)once;
    return *pool.load();
}

}  // namespace

void share(int64_t count, int threads, void (*part)(void*, int64_t), void* context) {
    if (count <= 0) return;
    const int helpers = int(std::min<int64_t>({int64_t(threads) - 1, count - 1, MOST_THREADS}));
    if (helpers <= 0) {
        for (int64_t k = 0; k < count; ++k) part(context, k);
        return;
    }
    Job job{part, context, count};
    the_pool().run(job, helpers);
    if (job.failure) std::rethrow_exception(job.failure);
}

void* scratch(int64_t bytes) {
    struct Block {
        void* data = nullptr;
        int64_t bytes = 0;
        ~Block() { release(); }
        void release() { ::operator delete(data, std::align_val_t(64)), data = nullptr, bytes = 0; }
    };
    static thread_local Block block;
    constexpr int64_t kept = 1 << 24;
    if (bytes > block.bytes || (block.bytes > kept && bytes <= kept)) {
        block.release();
        block.data = ::operator new(size_t(bytes), std::align_val_t(64));
        block.bytes = bytes;
    }
    return block.data;
}

double set_least_operations(double operations) { return least_operations.exchange(operations); }

int64_t parts_of(double operations, int64_t items, int threads) {
    const double least = least_operations.load(std::memory_order_relaxed);
    if (threads <= 1 || items <= 1 || operations < 2 * least) return 1;
    const double most = std::min(operations / least, double(PARTS_OF_A_THREAD) * threads);
    return std::max<int64_t>(1, std::min<int64_t>(items, int64_t(most)));
}

}  // namespace thalweg
