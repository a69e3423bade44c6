// The kernels by name, with their argument structs as arrays of 8-byte fields: `eagle_shim_run` for ctypes, and, with EAGLE_SHIM_MAIN, a program that reads a case from a file.
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../../csrc/cuda/accept.h"
#include "../../csrc/cuda/compact.h"
#include "../../csrc/cuda/expand_topk.h"
#include "../../csrc/cuda/rerank.h"

namespace shim {
extern uint64_t seed;
}

namespace {

template <typename Args>
int run(cudaError_t (*kernel)(const Args&, cudaStream_t), const int64_t* fields, int64_t num_fields) {
    static_assert(sizeof(Args) % 8 == 0 && std::is_trivially_copyable_v<Args>);
    if (num_fields * 8 != static_cast<int64_t>(sizeof(Args))) return -2;
    Args args;
    std::memcpy(&args, fields, sizeof(Args));
    return kernel(args, nullptr);
}

}  // namespace

// The launcher's error code; -1: no such kernel, -2: not its number of fields.
extern "C" int eagle_shim_run(const char* name, const int64_t* fields, int64_t num_fields, uint64_t seed) {
    shim::seed = seed;
    const std::string kernel = name;
    if (kernel == "accept") return run(eagle::cuda::accept, fields, num_fields);
    if (kernel == "compact") return run(eagle::cuda::compact, fields, num_fields);
    if (kernel == "expand_topk") return run(eagle::cuda::expand_topk, fields, num_fields);
    if (kernel == "rerank") return run(eagle::cuda::rerank, fields, num_fields);
    return -1;
}

#if defined(EAGLE_SHIM_MAIN)
// usage: program KERNEL CASE RESULT SEED. A case is int64 words: number of fields, then per field: its value, -1; or 0, the number of bytes, the bytes padded to whole words.
// Every buffer gets an allocation of its own, exactly as large, so that AddressSanitizer sees the first byte beyond it. The result is all buffers, padded, one after another.
int main(int argc, char** argv) {
    if (argc != 5) return 64;
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    size_t at = 0;
    const auto word = [&] {
        int64_t value;
        std::memcpy(&value, bytes.data() + at, 8);
        at += 8;
        return value;
    };
    std::vector<int64_t> fields(static_cast<size_t>(word()));
    std::vector<std::pair<char*, size_t>> buffers;
    for (int64_t& field : fields) {
        field = word();
        const int64_t size = word();
        if (size < 0) continue;
        char* buffer = static_cast<char*>(std::malloc(static_cast<size_t>(size)));
        std::memcpy(buffer, bytes.data() + at, static_cast<size_t>(size));
        at += (static_cast<size_t>(size) + 7) / 8 * 8;
        buffers.emplace_back(buffer, static_cast<size_t>(size));
        field = reinterpret_cast<int64_t>(buffer);
    }
    const int error = eagle_shim_run(argv[1], fields.data(), static_cast<int64_t>(fields.size()), std::stoull(argv[4]));
    if (error != 0) return 65;
    std::ofstream result(argv[3], std::ios::binary);
    const char padding[8] = {};
    for (const auto& [buffer, size] : buffers) {
        result.write(buffer, static_cast<std::streamsize>(size));
        result.write(padding, static_cast<std::streamsize>((8 - size % 8) % 8));
        std::free(buffer);
    }
    return result.good() ? 0 : 66;
}
#endif
