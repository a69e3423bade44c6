// The library `eagle_kernels` of torch, and the Python module that carries it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/kernels.h"
#include "torch_checks.h"

namespace eagle::torch_api {
thread_local Recording* recording = nullptr;
}  // namespace eagle::torch_api

using eagle::torch_api::Recording;
using eagle::torch_api::recording;

TORCH_LIBRARY(eagle_kernels, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias, int out_features, bool deterministic, Tensor(a!) out) -> ()");
    m.def("expert_linear(Tensor x, Tensor weight, Tensor expert_ids, int out_features, Tensor(a!) out) -> ()");
    m.def("embedding(Tensor ids, Tensor weight, int out_features, Tensor(a!) out) -> ()");
    m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual, Tensor(b!) out) -> ()");
    m.def("copy_rows(Tensor x, Tensor(a!) out) -> ()");
    m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");
    m.def("route_experts(Tensor router_logits, bool normalize, Tensor(a!) weights, Tensor(b!) expert_ids) -> ()");
    m.def("rope_store_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor position_ids, Tensor rope_table, Tensor(b!) kv_cache, Tensor page_table, Tensor seq_lens, int row_offset) -> ()");
    m.def("tree_attention(Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor? packed_ancestor_mask, float scale, int window, float soft_cap, bool deterministic, Tensor(a!) out, Tensor(b!)? lse) -> ()");
    m.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, bool min_p_first, Tensor? logit_bias, Tensor? repetition_penalty, "
          "Tensor? presence_penalty, Tensor? frequency_penalty, Tensor? prompt_mask, Tensor? output_counts, Tensor(a!) out, Tensor(b!)? log_probs) -> ()");
    m.def("filter_probs(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, bool min_p_first, Tensor(a!) out) -> ()");
    m.def("draw_children(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int lanes, bool min_p_first, Tensor(a!) out) -> ()");
    m.def("noise(Tensor seeds, Tensor positions, int stream, bool uniform, Tensor(a!) out) -> ()");
    m.def("head_topk(Tensor features, Tensor weight, int out_features, Tensor(a!) keys, Tensor(b!) max, Tensor(c!) sum_exp) -> ()");
    m.def("logits_topk(Tensor logits, Tensor(a!) keys, Tensor(b!) max, Tensor(c!) sum_exp) -> ()");
    m.def("expand(Tensor logits, Tensor frontier_scores, Tensor frontier_pool_index, Tensor features, Tensor frontier_mask, Tensor(a!) pool_tokens, Tensor(b!) pool_scores, Tensor(c!) pool_parents, "
          "int pool_offset, int top_k, int first_row, Tensor? draft_to_target, Tensor? choices, Tensor(d!) tokens, Tensor(e!) scores, Tensor(f!) pool_index, Tensor(g!) next_features, "
          "Tensor(h!) next_mask) -> ()");
    m.def("expand_topk(Tensor keys, Tensor max, Tensor sum_exp, Tensor frontier_scores, Tensor frontier_pool_index, Tensor features, Tensor frontier_mask, Tensor(a!) pool_tokens, "
          "Tensor(b!) pool_scores, Tensor(c!) pool_parents, int pool_offset, int top_k, int first_row, Tensor? draft_to_target, Tensor? choices, Tensor? seq_lens, int depth, "
          "Tensor(d!) tokens, Tensor(e!) scores, Tensor(f!) pool_index, Tensor(g!) next_features, Tensor(h!) next_mask, Tensor(i!)? position_ids) -> ()");
    m.def("rerank(Tensor pool_tokens, Tensor pool_scores, Tensor pool_parents, Tensor root_tokens, Tensor seq_lens, Tensor? choices, Tensor(a!) tokens, Tensor(b!) parent, Tensor(c!) depth, "
          "Tensor(d!) packed_ancestor_mask, Tensor(e!) position_ids) -> ()");
    m.def("accept(Tensor tokens, Tensor parent, Tensor sampled, Tensor(a!) active, Tensor? stop_token_ids, Tensor(b!)? output_ring, Tensor(c!) accepted_nodes, Tensor(d!) num_accepted_drafts, "
          "Tensor(e!) bonus_token) -> ()");
    m.def("accept_rejection(Tensor tokens, Tensor parent, Tensor target_probs, Tensor draft_probs, Tensor seeds, Tensor positions, Tensor active, Tensor(a!) accepted_nodes, "
          "Tensor(b!) num_accepted_drafts, Tensor(c!) bonus_token) -> ()");
    m.def("advance(Tensor tokens, Tensor features, Tensor accepted_nodes, Tensor num_accepted_drafts, Tensor bonus_token, Tensor active, Tensor(a!) seq_lens, Tensor(b!) root_tokens, "
          "Tensor(c!) num_pending, Tensor(d!) pending_tokens, Tensor(e!) pending_features, Tensor(f!)? num_missed, Tensor(g!)? missed_tokens, Tensor(h!)? missed_features) -> ()");
    m.def("compact(Tensor(a!) kv_cache, Tensor page_table, Tensor seq_lens, Tensor accepted_nodes, Tensor num_accepted_drafts) -> ()");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<Recording>(m, "Recording")
        .def(pybind11::init<>())
        .def("begin", [](Recording& self) {
            TORCH_CHECK(recording == nullptr, "a recording is open already");
            recording = &self;
        })
        .def("end", [](Recording&) { recording = nullptr; })
        .def("replay", [](const Recording& self) {
            for (const auto& call : self.calls) call();
        }, pybind11::call_guard<pybind11::gil_scoped_release>())
        .def_property_readonly("num_calls", [](const Recording& self) { return self.calls.size(); });
    m.def("isa", [] { return std::string(eagle::kernels().name); }, "Instruction set of the CPU kernels in use.");
    m.def("set_isa", [](const std::string& name) {
        if (!eagle::set_isa(name.c_str())) throw pybind11::value_error("isa: expected one of those of available_isas(), got '" + name + "'");
    });
    m.def("available_isas", [] {
        std::vector<std::string> names;
        for (const char* name : {"portable", "avx2", "avx512", "amx"})
            if (eagle::isa_available(name)) names.push_back(name);
        return names;
    });
}
