// A thread of the system per CUDA thread, for ThreadSanitizer. Up to kLiveBlocks blocks are live together, so a race between blocks is seen too.
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <deque>

#include "scheduler.h"

namespace shim {

namespace {

constexpr unsigned kLiveBlocks = 8;
constexpr size_t kStackBytes = 256 * 1024;

// Waiting without ordering memory: relaxed atomics and a bare system call, so that ThreadSanitizer takes no edge from a shuffle or a ballot, which give none on the GPU.
struct RelaxedBarrier {
    std::atomic<uint32_t> arrived{0}, generation{0};
    void wait(uint32_t count) {
        const uint32_t before = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_relaxed) + 1 == count) {
            arrived.store(0, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_relaxed);
            syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
            return;
        }
        while (generation.load(std::memory_order_relaxed) == before) syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
    }
};

// Two barriers take turns. With one alone, a thread that wakes late from one round would also take in what others released on arriving at the next, and ThreadSanitizer would miss races.
struct Barrier {
    pthread_barrier_t turns[2];
    explicit Barrier(unsigned count) {
        for (pthread_barrier_t& barrier : turns) pthread_barrier_init(&barrier, nullptr, count);
    }
    ~Barrier() {
        for (pthread_barrier_t& barrier : turns) pthread_barrier_destroy(&barrier);
    }
    void wait(unsigned round) { pthread_barrier_wait(&turns[round % 2]); }
};

struct Warp {
    RelaxedBarrier values_written;
    Barrier barrier{32};
    std::atomic<uint64_t> slots[2][32];
};

struct Block {
    std::deque<Warp> warps;
    Barrier barrier;
    std::atomic<bool> any[3]{};
    char* shared;
    unsigned index;
    Block(unsigned threads, size_t shared_bytes, unsigned index_) : warps(threads / 32), barrier(threads), shared(new_shared_memory(shared_bytes)), index(index_) {}
    ~Block() { std::free(shared); }
};

struct Start {
    Block* block;
    unsigned thread;
    const cudaLaunchConfig_t* config;
    const std::function<void()>* body;
};

thread_local Block* my_block;
thread_local unsigned parity, votes, warp_rounds, block_rounds;

Warp& my_warp() { return my_block->warps[threadIdx.x / 32]; }

void* run_thread(void* argument) {
    const Start& start = *static_cast<Start*>(argument);
    my_block = start.block;
    parity = votes = warp_rounds = block_rounds = 0;
    threadIdx = dim3(start.thread);
    blockIdx = dim3(start.block->index);
    blockDim = start.config->blockDim;
    gridDim = start.config->gridDim;
    (*start.body)();
    return nullptr;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel) {
    if (const cudaError_t error = check_launch(config)) return error;
    const unsigned threads = config.blockDim.x;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    for (unsigned first = 0; first < config.gridDim.x; first += kLiveBlocks) {
        const unsigned live = std::min(kLiveBlocks, config.gridDim.x - first);
        std::deque<Block> blocks;
        std::deque<Start> starts;
        std::vector<pthread_t> ids;
        for (unsigned i = 0; i < live; ++i) {
            Block& block = blocks.emplace_back(threads, config.dynamicSmemBytes, first + i);
            for (unsigned thread = 0; thread < threads; ++thread) {
                starts.push_back({&block, thread, &config, &kernel});
                ids.emplace_back();
                if (pthread_create(&ids.back(), &attributes, run_thread, &starts.back()) != 0) die("no more threads");
            }
        }
        for (const pthread_t id : ids) pthread_join(id, nullptr);
    }
    return cudaSuccess;
}

// Two sets of slots take turns: who is a call ahead writes to the other set, and cannot be two ahead.
WarpValues exchange(uint64_t value) {
    Warp& warp = my_warp();
    std::atomic<uint64_t>* slots = warp.slots[parity ^= 1];
    slots[lane()].store(value, std::memory_order_relaxed);
    warp.values_written.wait(32);
    WarpValues values;
    for (int i = 0; i < 32; ++i) values.lane[i] = slots[i].load(std::memory_order_relaxed);
    return values;
}

void sync_warp() { my_warp().barrier.wait(warp_rounds++); }
void sync_block() { my_block->barrier.wait(block_rounds++); }

// Three votes take turns: the next one is cleared while no thread can have reached it.
bool sync_block_or(bool value) {
    const unsigned vote = votes++ % 3;
    if (value) my_block->any[vote].store(true, std::memory_order_relaxed);
    sync_block();
    if (threadIdx.x == 0) my_block->any[(vote + 2) % 3].store(false, std::memory_order_relaxed);
    return my_block->any[vote].load(std::memory_order_relaxed);
}

}  // namespace shim

namespace eagle::cuda {
char* shared_memory() { return shim::my_block->shared; }
}  // namespace eagle::cuda
