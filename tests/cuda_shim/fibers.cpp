// Fibers: the threads of a block take turns on one thread of the system; who goes on is drawn from the seed. Blocks run one after another, in a drawn order.
#include <ucontext.h>

#include <memory>

#include "scheduler.h"

namespace shim {

namespace {

constexpr size_t kStackBytes = 64 * 1024;

enum class State { ready, at_exchange, at_warp, at_block, done };

struct Fiber {
    ucontext_t context;
    State state;
    unsigned parity;  // of its exchanges
    std::unique_ptr<char[]> stack;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<uint64_t> slots;  // [warp][parity][lane]
    char* shared;
    bool any[3];
    unsigned votes_cast;
};

std::vector<Fiber> pool;  // stacks are kept between launches
Block block;
ucontext_t scheduler;
size_t current;
const std::function<void()>* body;
uint64_t random_state;

uint64_t draw(uint64_t below) {  // splitmix64
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % below;
}

void run_fiber() {
    (*body)();
    block.fibers[current].state = State::done;
    swapcontext(&block.fibers[current].context, &scheduler);
}

void wait(State state) {
    block.fibers[current].state = state;
    swapcontext(&block.fibers[current].context, &scheduler);
}

// Lets go on whoever waits with all that it waits for. With exited threads a barrier is never complete: the kernels must not leave anyone behind.
bool release(size_t first, size_t count, State state) {
    for (size_t i = first; i < first + count; ++i)
        if (block.fibers[i].state != state) return false;
    for (size_t i = first; i < first + count; ++i) block.fibers[i].state = State::ready;
    return true;
}

void run_block(unsigned threads) {
    std::vector<size_t> ready(threads);
    for (size_t i = 0; i < threads; ++i) ready[i] = i;
    size_t done = 0;
    while (done < threads) {
        if (ready.empty()) die("divergent barrier: some threads of a block wait for others that never come");
        const size_t place = draw(ready.size());
        current = ready[place];
        ready[place] = ready.back();
        ready.pop_back();
        threadIdx = dim3(static_cast<unsigned>(current));
        swapcontext(&scheduler, &block.fibers[current].context);
        const State state = block.fibers[current].state;
        const size_t warp = current / 32 * 32;
        if (state == State::done) ++done;
        if ((state == State::at_exchange || state == State::at_warp) && release(warp, 32, state))
            for (size_t i = warp; i < warp + 32; ++i) ready.push_back(i);
        if (state == State::at_block && release(0, threads, state))
            for (size_t i = 0; i < threads; ++i) ready.push_back(i);
    }
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel) {
    if (const cudaError_t error = check_launch(config)) return error;
    const unsigned threads = config.blockDim.x, blocks = config.gridDim.x;
    random_state = seed;
    body = &kernel;
    blockDim = config.blockDim;
    gridDim = config.gridDim;
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    block.fibers.resize(std::max<size_t>(block.fibers.size(), threads));
    block.slots.assign(threads * 2, 0);
    for (const unsigned index : order) {
        blockIdx = dim3(index);
        block.shared = new_shared_memory(config.dynamicSmemBytes);
        block.votes_cast = 0;
        block.any[0] = block.any[1] = block.any[2] = false;
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& fiber = block.fibers[i];
            if (fiber.stack == nullptr) fiber.stack = std::make_unique<char[]>(kStackBytes);
            fiber.state = State::ready;
            fiber.parity = 0;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = kStackBytes;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, run_fiber, 0);
        }
        run_block(threads);
        std::free(block.shared);
    }
    return cudaSuccess;
}

// Two sets of slots take turns: who is a call ahead writes to the other set, and cannot be two ahead.
WarpValues exchange(uint64_t value) {
    const size_t self = current;
    uint64_t* slots = block.slots.data() + self / 32 * 64 + 32 * (block.fibers[self].parity ^= 1);
    slots[self % 32] = value;
    wait(State::at_exchange);
    WarpValues values;
    std::memcpy(values.lane, slots, sizeof(values.lane));
    return values;
}

void sync_warp() { wait(State::at_warp); }
void sync_block() { wait(State::at_block); }

// Three votes take turns: the one after the next is cleared by whoever votes first.
bool sync_block_or(bool value) {
    const unsigned vote = block.votes_cast++ / blockDim.x % 3;
    block.any[vote] |= value;
    block.any[(vote + 1) % 3] = false;
    wait(State::at_block);
    return block.any[vote];
}

}  // namespace shim

namespace eagle::cuda {
char* shared_memory() { return shim::block.shared; }
}  // namespace eagle::cuda
