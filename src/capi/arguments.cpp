// See arguments.hpp. Three steps: the set of tensors against the plan's problem (what is needed, what has no meaning),
// each tensor by itself (dtype, shape, strides, pointer), and the bytes of every output against everything else; the
// last two are views.hpp's.
#include "capi/arguments.hpp"

#include <cstddef>
#include <initializer_list>
#include <utility>

#include "capi/structs.hpp"
#include "capi/views.hpp"

namespace logitless::capi {
namespace {

using contract::Call;
using contract::Kind;
using contract::Problem;

// ---- the set -----------------------------------------------------------------------------------------------------------

void need(const char* name, const void* pointer, const char* because) {
  if (pointer == nullptr) refuse(std::string(name) + ": null; " + because);
}

void forbid(const char* name, const void* pointer, const char* because) {
  if (pointer != nullptr) refuse(std::string(name) + ": given; " + because + ": must be null");
}

// A gradient is given exactly when the plan computes it.
void match_gradient(const char* name, const ll_tensor* tensor, DType planned) {
  if (planned == DType::none && tensor != nullptr) {
    refuse(std::string(name) + ": given; the plan was made with " + name +
           "_dtype LL_NONE: must be null, or make a plan "
           "that computes it");
  }
  if (planned != DType::none && tensor == nullptr) {
    refuse(std::string(name) + ": null; the plan computes it: must be a tensor of " + contract::name_of(planned));
  }
}

// An input is given exactly when the problem names it.
void match_input(const char* name, const ll_tensor* tensor, bool planned, const char* bit) {
  if (!planned && tensor != nullptr) {
    refuse(std::string(name) + ": given; the plan was made without " + bit + ": must be null, or make a plan with it");
  }
  if (planned && tensor == nullptr) {
    refuse(std::string(name) + ": null; the plan was made with " + bit + ": must be a tensor");
  }
}

// An output may be asked for when the problem allows it.
void allow_output(const char* name, const void* pointer, bool planned, const char* bit) {
  if (planned || pointer == nullptr) return;
  refuse(std::string(name) + ": given; the plan was made without " + bit + ": must be null, or make a plan with it");
}

// Rows have a class of their own: y is more than a mark of the rows that are left out.
bool has_classes(const Problem& p) {
  return p.loss.targets == contract::Targets::hard || p.loss.distillation.hard_share > 0.0;
}

void check_inputs(const ll_arguments& a, const Problem& p) {
  if (p.kind == Kind::linear) {
    need("hidden", a.hidden, "a problem of kind linear needs it");
    need("weight", a.weight, "a problem of kind linear needs it");
    forbid("logits", a.logits, "a problem of kind linear has none");
  } else {
    need("logits", a.logits, "a problem of kind logits needs it");
    forbid("hidden", a.hidden, "a problem of kind logits has none");
    forbid("weight", a.weight, "a problem of kind logits has none");
  }
  if (has_classes(p)) {
    need("targets", a.targets,
         p.loss.targets == contract::Targets::hard ? "every call with hard targets needs them"
                                                   : "a hard_share above 0 needs them");
  }
  const auto none = DType::none;
  match_input("bias", a.bias, p.bias != none, "bias_dtype");
  match_input("class_weight", a.class_weight, p.class_weight, "LL_CLASS_WEIGHT");
  match_input("row_weight", a.row_weight, p.row_weight, "LL_ROW_WEIGHT");
  match_input("row_temperature", a.row_temperature, p.row_temperature, "LL_ROW_TEMPERATURE");
  match_input("keep_mask", a.keep_mask, p.keep_mask, "LL_KEEP_MASK");
  match_input("logit_floor", a.logit_floor, p.logit_floor, "LL_LOGIT_FLOOR");
  match_input("soft_targets", a.soft_targets, p.soft != none, "targets LL_TARGETS_SOFT");
  match_input("topk_ids", a.topk_ids, p.topk > 0, "targets LL_TARGETS_TOPK");
  match_input("topk_probs", a.topk_probs, p.topk > 0, "targets LL_TARGETS_TOPK");
  match_input("teacher_hidden", a.teacher_hidden, p.distils(), "targets LL_TARGETS_TEACHER");
  match_input("teacher_weight", a.teacher_weight, p.distils(), "targets LL_TARGETS_TEACHER");
  match_input("teacher_bias", a.teacher_bias, p.teacher_bias != none, "teacher_bias_dtype");
  const contract::Policy& policy = p.loss.policy;
  match_input("old_logprob", a.old_logprob, policy.on, "rule LL_RULE_POLICY");
  match_input("advantage", a.advantage, policy.on, "rule LL_RULE_POLICY");
  match_input("ref_logprob", a.ref_logprob, policy.on && policy.kl_coef != 0.0, "a kl_coef above 0");
  if (p.loss.reduction != contract::Reduction::mean) {
    forbid("normalizer", a.normalizer, "only reduction LL_MEAN divides");
  }
}

void check_outputs(const ll_arguments& a, const Problem& p) {
  match_gradient("grad_hidden", a.grad_hidden, p.dx);
  match_gradient("grad_weight", a.grad_weight, p.dw);
  match_gradient("grad_logits", a.grad_logits, p.dz);
  match_gradient("grad_bias", a.grad_bias, p.db);
  const std::pair<const char*, const void*> outputs[] = {{"loss", a.loss},
                                                         {"row_loss", a.row_loss},
                                                         {"row_lse", a.row_lse},
                                                         {"row_logprob", a.row_logprob},
                                                         {"row_entropy", a.row_entropy},
                                                         {"row_argmax", a.row_argmax},
                                                         {"row_correct", a.row_correct},
                                                         {"row_zloss", a.row_zloss},
                                                         {"row_mean_logit", a.row_mean_logit},
                                                         {"row_log_sum_p2", a.row_log_sum_p2},
                                                         {"correct_rows", a.correct_rows}};
  for (const auto& [name, pointer] : outputs) {
    if (p.call == Call::backward) forbid(name, pointer, "backward does not compute it");
    if (p.is_part()) forbid(name, pointer, "a part of a vocabulary gives stats alone (total_vocab)");
  }
  if (p.is_part()) need("stats", a.stats, "a part of a vocabulary has no other result (total_vocab)");
  allow_output("row_entropy", a.row_entropy, p.entropy, "LL_ENTROPY");
  allow_output("row_argmax", a.row_argmax, p.argmax, "LL_ARGMAX");
  allow_output("row_correct", a.row_correct, p.argmax, "LL_ARGMAX");
  allow_output("correct_rows", a.correct_rows, p.argmax, "LL_ARGMAX");
  allow_output("row_mean_logit", a.row_mean_logit, p.mean_logit, "LL_MEAN_LOGIT");
  allow_output("row_log_sum_p2", a.row_log_sum_p2, p.sum_p2, "LL_SUM_P2");
  allow_output("filter_kept", a.filter_kept, p.loss.filter > 0.0, "filter");
  allow_output("filter_variance", a.filter_variance, p.loss.filter > 0.0, "filter");
  if (!has_classes(p)) {
    constexpr const char* because = "rows have no class of their own without hard targets or a hard_share";
    forbid("row_logprob", a.row_logprob, because);
    forbid("row_correct", a.row_correct, because);
    forbid("correct_rows", a.correct_rows, because);
    forbid("grad_row_logprob", a.grad_row_logprob, because);
  }
  if (p.saved > 0) {
    need("saved", a.saved, "the problem has saved_bytes");
  } else {
    forbid("saved", a.saved, "the problem has saved_bytes 0");
  }
  if (p.loss.reduction == contract::Reduction::none) {
    forbid("loss", a.loss, "reduction LL_PER_ROW has no reduced loss, row_loss is the result");
  }
}

void check_backward(const ll_arguments& a, const Problem& p) {
  if (p.call != Call::backward) {
    forbid("lse", a.lse, "only backward of kind logits takes it");
  } else if (p.kind == Kind::linear) {
    need("stats", a.stats, "backward needs what forward wrote there");
    forbid("lse", a.lse, "only backward of kind logits takes it");
  } else if (a.stats != nullptr) {
    forbid("lse", a.lse, "stats says the same more exactly");
  } else if (p.statistics() != 4) {
    need("stats", a.stats, "backward needs what forward wrote there, lse alone does not do with these options");
  } else {
    need("lse", a.lse, "backward of kind logits needs stats or lse");
  }
  if (p.loss.reduction == contract::Reduction::none) {
    forbid("grad_loss_factor", a.grad_loss_factor, "reduction LL_PER_ROW has no reduced loss, grad_row_loss is for it");
  }
  if (p.call == Call::forward) {
    forbid("grad_loss_factor", a.grad_loss_factor, "forward computes no gradient");
    forbid("grad_row_loss", a.grad_row_loss, "forward computes no gradient");
    forbid("grad_row_lse", a.grad_row_lse, "forward computes no gradient");
    forbid("grad_row_logprob", a.grad_row_logprob, "forward computes no gradient");
    forbid("grad_row_entropy", a.grad_row_entropy, "forward computes no gradient");
  }
  allow_output("grad_row_entropy", a.grad_row_entropy, p.entropy_gradient, "LL_ENTROPY_GRADIENT");
}

void check_presence(const ll_arguments& a, const Problem& p) {
  check_inputs(a, p);
  check_outputs(a, p);
  check_backward(a, p);
}

ll_arguments default_arguments() {
  ll_arguments arguments{};
  arguments.size = sizeof arguments;
  arguments.grad_loss = 1.0;
  return arguments;
}

bool same_view(const View& a, const View& b) {
  return a.data == b.data && a.dtype == b.dtype && a.row_stride == b.row_stride && a.col_stride == b.col_stride;
}

}  // namespace

// Every field may be a pointer, and the size stands for the workspace.
static_assert(sizeof(ll_arguments) / sizeof(void*) <= Regions::kMost);

CheckedArguments checked_arguments(const ll_arguments* arguments, const Problem& p, const void* workspace,
                                   std::size_t workspace_bytes, Place place) {
  const ll_arguments a = read_struct(arguments, "arguments", "ll_arguments", default_arguments());
  check_presence(a, p);

  Regions regions;
  Checker check(regions, place);
  CheckedArguments out;
  Operands& o = out.operands;
  // Inputs first: the messages about overlap then name the output before the input.
  const std::initializer_list<DType> f32 = {DType::f32}, whole = {DType::i64, DType::i32},
                                     scalar = {DType::f32, DType::f64};
  const auto matrix = [&](View& out_view, const char* name, const ll_tensor* tensor, Role role, std::int64_t rows,
                          std::int64_t cols, std::initializer_list<DType> allowed) {
    if (tensor != nullptr) out_view = check.matrix(name, tensor, role, rows, cols, allowed);
  };
  const auto vector = [&](View& out_view, const char* name, const ll_tensor* tensor, Role role, std::int64_t length,
                          std::initializer_list<DType> allowed) {
    if (tensor != nullptr) out_view = check.vector(name, tensor, role, length, allowed);
  };
  const Role in = Role::input, written = Role::output;
  matrix(o.x, "hidden", a.hidden, in, p.rows, p.hidden, {p.x});
  matrix(o.w, "weight", a.weight, in, p.vocab, p.hidden, {p.w});
  matrix(o.z, "logits", a.logits, in, p.rows, p.vocab, {p.z});
  vector(o.targets, "targets", a.targets, in, p.rows, whole);
  vector(o.bias, "bias", a.bias, in, p.vocab, {p.bias});
  vector(o.class_weight, "class_weight", a.class_weight, in, p.classes(), f32);
  vector(o.row_weight, "row_weight", a.row_weight, in, p.rows, f32);
  vector(o.row_temperature, "row_temperature", a.row_temperature, in, p.rows, f32);
  matrix(o.keep_mask, "keep_mask", a.keep_mask, in, p.rows, (p.vocab + 7) / 8, {DType::u8});
  vector(o.logit_floor, "logit_floor", a.logit_floor, in, p.rows, f32);
  matrix(o.soft, "soft_targets", a.soft_targets, in, p.rows, p.vocab, {p.soft});
  matrix(o.topk_ids, "topk_ids", a.topk_ids, in, p.rows, p.topk, whole);
  matrix(o.topk_probs, "topk_probs", a.topk_probs, in, p.rows, p.topk, f32);
  matrix(o.teacher_x, "teacher_hidden", a.teacher_hidden, in, p.rows, p.teacher_hidden, {p.teacher_x});
  matrix(o.teacher_w, "teacher_weight", a.teacher_weight, in, p.vocab, p.teacher_hidden, {p.teacher_w});
  vector(o.teacher_bias, "teacher_bias", a.teacher_bias, in, p.vocab, {p.teacher_bias});
  vector(o.old_logprob, "old_logprob", a.old_logprob, in, p.rows, f32);
  vector(o.advantage, "advantage", a.advantage, in, p.rows, f32);
  vector(o.ref_logprob, "ref_logprob", a.ref_logprob, in, p.rows, f32);
  if (a.normalizer != nullptr) o.normalizer = check.scalar("normalizer", a.normalizer, in, scalar);
  const bool backward = p.call == Call::backward;
  matrix(o.stats, "stats", a.stats, backward ? in : written, p.rows, p.statistics(), f32);
  vector(o.lse, "lse", a.lse, in, p.rows, f32);
  vector(o.saved, "saved", a.saved, backward ? in : written, static_cast<std::int64_t>(p.saved), {DType::u8});
  if (o.saved && (o.saved.row_stride != 1 || reinterpret_cast<std::uintptr_t>(o.saved.data) % 64 != 0)) {
    refuse("saved: at " + address(o.saved.data) + " with stride " + number(o.saved.row_stride) +
           "; must be aligned to 64 bytes, and adjacent");
  }
  if (a.grad_loss_factor != nullptr) {
    o.grad_loss_factor = check.scalar("grad_loss_factor", a.grad_loss_factor, in, scalar);
  }
  vector(o.grad_row_loss, "grad_row_loss", a.grad_row_loss, in, p.rows, f32);
  vector(o.grad_row_lse, "grad_row_lse", a.grad_row_lse, in, p.rows, f32);
  vector(o.grad_row_logprob, "grad_row_logprob", a.grad_row_logprob, in, p.rows, f32);
  vector(o.grad_row_entropy, "grad_row_entropy", a.grad_row_entropy, in, p.rows, f32);

  if (a.loss != nullptr) out.loss = check.scalar("loss", a.loss, written, scalar);
  vector(o.row_loss, "row_loss", a.row_loss, written, p.rows, f32);
  vector(o.row_lse, "row_lse", a.row_lse, written, p.rows, f32);
  vector(o.row_logprob, "row_logprob", a.row_logprob, written, p.rows, f32);
  vector(o.row_entropy, "row_entropy", a.row_entropy, written, p.rows, f32);
  vector(o.row_argmax, "row_argmax", a.row_argmax, written, p.rows, whole);
  vector(o.row_correct, "row_correct", a.row_correct, written, p.rows, {DType::u8});
  vector(o.row_zloss, "row_zloss", a.row_zloss, written, p.rows, f32);
  vector(o.row_mean_logit, "row_mean_logit", a.row_mean_logit, written, p.rows, f32);
  vector(o.row_log_sum_p2, "row_log_sum_p2", a.row_log_sum_p2, written, p.rows, f32);
  matrix(o.dx, "grad_hidden", a.grad_hidden, written, p.rows, p.hidden, {p.dx});
  matrix(o.dw, "grad_weight", a.grad_weight, written, p.vocab, p.hidden, {p.dw});
  // A rule of the problem, not of the setting that the planner happened to take: it must not depend on the budget.
  if (o.dw && p.dw_contiguous && o.dw.row_stride != p.hidden) {
    refuse("grad_weight: row stride " + number(o.dw.row_stride) + "; must be " + number(p.hidden) +
           " (rows adjacent), or set LL_GRAD_WEIGHT_STRIDED in the problem's flags");
  }
  matrix(o.dz, "grad_logits", a.grad_logits, written, p.rows, p.vocab, {p.dz});
  vector(o.db, "grad_bias", a.grad_bias, written, p.vocab, {p.db});
  if (o.db && o.db.row_stride != 1) {
    refuse("grad_bias: stride " + number(o.db.row_stride) + "; must be 1, as it is added to in blocks");
  }
  o.grad_loss = a.grad_loss;
  out.kept_rows = a.kept_rows;
  out.bad_rows = a.bad_rows;
  out.correct_rows = a.correct_rows;
  out.filter_kept = a.filter_kept;
  out.filter_variance = a.filter_variance;
  regions.add("kept_rows", true, a.kept_rows, sizeof *a.kept_rows);
  regions.add("bad_rows", true, a.bad_rows, sizeof *a.bad_rows);
  regions.add("correct_rows", true, a.correct_rows, sizeof *a.correct_rows);
  regions.add("filter_kept", true, a.filter_kept, sizeof *a.filter_kept);
  regions.add("filter_variance", true, a.filter_variance, sizeof *a.filter_variance);
  regions.add("workspace", true, workspace, workspace_bytes);
  regions.check(p.in_place && same_view(o.z, o.dz));
  return out;
}

}  // namespace logitless::capi

// The exported name fills what 0.1 had, as ll_options_init does.
static_assert(offsetof(ll_arguments, bias) == 144);

void(ll_arguments_init)(ll_arguments* arguments) noexcept {
  ll_arguments_init_sized(arguments, offsetof(ll_arguments, bias));
}

void ll_arguments_init_sized(ll_arguments* arguments, size_t bytes) noexcept {
  logitless::capi::write_struct(arguments, bytes, logitless::capi::default_arguments());
}
