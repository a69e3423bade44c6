// head_topk and logits_topk. On the CPU a row is one tile that holds the whole vocabulary.
#include "cpu/kernels.h"
#include "torch_checks.h"

namespace {

using namespace eagle::torch_api;

eagle::LogitsTopkArgs topk_args(int64_t rows, int64_t vocab, const Tensor& keys, const Tensor& max, const Tensor& sum_exp) {
    EK_REQUIRE(vocab > 0 && vocab < (int64_t{1} << 31), "out_features: expected a vocabulary of 1 to 2147483647, got ", vocab);
    check("keys", keys, {rows, 1, kAny}, at::kLong);
    EK_REQUIRE(keys.size(2) >= 1 && keys.size(2) <= eagle::kMaxTopK, "top_k: expected 1 to ", eagle::kMaxTopK, ", got ", keys.size(2));
    check("max", max, {rows, 1}, at::kFloat);
    check("sum_exp", sum_exp, {rows, 1}, at::kFloat);
    return {nullptr, keys.mutable_data_ptr<int64_t>(), max.mutable_data_ptr<float>(), sum_exp.mutable_data_ptr<float>(), rows, vocab, 0, keys.size(2), threads()};
}

void head_topk(const Tensor& features, const Tensor& weight, int64_t out_features, Tensor keys, Tensor max, Tensor sum_exp) {
    check_packed("features", features, weight, out_features, false);
    const eagle::LinearArgs head{features.const_data_ptr<float>(), weight.const_data_ptr(), nullptr, nullptr, nullptr, features.size(0), features.size(1), out_features,
                                 features.stride(0), 0, 1, weight_dtype("weight", weight), threads()};
    const eagle::HeadTopkArgs args{head, topk_args(features.size(0), out_features, keys, max, sum_exp)};
    launch([args] { eagle::kernels().head_topk(args); }, {features, weight, keys, max, sum_exp});
}

void logits_topk(const Tensor& logits, Tensor keys, Tensor max, Tensor sum_exp) {
    check_rows("logits", logits, {kAny, kAny}, at::kFloat);
    eagle::LogitsTopkArgs args = topk_args(logits.size(0), logits.size(1), keys, max, sum_exp);
    args.logits = logits.const_data_ptr<float>();
    args.logits_stride = logits.stride(0);
    launch([args] { eagle::kernels().logits_topk(args); }, {logits, keys, max, sum_exp});
}

}  // namespace

TORCH_LIBRARY_IMPL(eagle_kernels, CPU, m) {
    m.impl("head_topk", &head_topk);
    m.impl("logits_topk", &logits_topk);
}
