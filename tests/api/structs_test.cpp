// The ABI's rule for structs: they begin with their size and only grow at their end. An older caller's shorter struct
// has the defaults in its missing tail; a newer caller's longer one must have zeros there.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

constexpr std::uint64_t kCanary = 0x5a5a5a5a5a5a5a5a;

// A copy with `size` bytes on the heap exactly, so that a sanitizer sees any read beyond.
template <class Struct>
std::vector<std::uint64_t> resized(const Struct& value, std::size_t size) {
  std::vector<std::uint64_t> words((size + 7) / 8, 0);
  std::memcpy(words.data(), &value, std::min(size, sizeof value));
  words[0] = size;
  return words;
}

template <class Struct>
Struct* as(std::vector<std::uint64_t>& words) {
  return reinterpret_cast<Struct*>(words.data());
}

ll_status plan_with(const ll_problem* problem, const ll_options* options) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  ll_plan* plan = nullptr;
  const ll_status status = ll_plan_create(context.get(), problem, options, &plan);
  ll_plan_destroy(plan);
  return status;
}

// The layout is the ABI: a field that moves or a size that changes without growing at the end is a break.
TEST(Structs, LayoutIsWhatWasPublished) {
  EXPECT_EQ(sizeof(ll_tensor), 96u);
  EXPECT_EQ(offsetof(ll_tensor, stride), 64u);
  EXPECT_EQ(sizeof(ll_context_options), 48u);
  EXPECT_EQ(offsetof(ll_context_options, device), 40u);
  EXPECT_EQ(offsetof(ll_context_options, cpu_target), 32u);
  EXPECT_EQ(sizeof(ll_options), 176u);
  EXPECT_EQ(offsetof(ll_options, on_empty), 40u);
  EXPECT_EQ(sizeof(ll_problem), 168u);
  EXPECT_EQ(offsetof(ll_problem, most_kept_rows), 160u);
  EXPECT_EQ(offsetof(ll_problem, flags), 64u);
  EXPECT_EQ(offsetof(ll_problem, memory_budget), 72u);
  EXPECT_EQ(sizeof(ll_arguments), 392u);
  EXPECT_EQ(offsetof(ll_arguments, grad_loss), 104u);
  EXPECT_EQ(offsetof(ll_arguments, bad_rows), 136u);
  EXPECT_EQ(offsetof(ll_arguments, saved), 376u);
  EXPECT_EQ(offsetof(ll_arguments, grad_loss_factor), 384u);
}

// Initialises a struct of `size` bytes that ends where something else begins.
template <class Struct>
std::vector<std::uint64_t> initialised(void (*init)(Struct*, std::size_t), std::size_t size) {
  std::vector<std::uint64_t> words(size / 8 + 4, kCanary);
  init(reinterpret_cast<Struct*>(words.data()), size);
  return words;
}

// The exported ll_*_init are those of programs built with 0.1: the bytes after its structs are not theirs to write.
template <class Struct>
void expect_init_of_0_1(void (*exported)(Struct*), void (*sized)(Struct*, std::size_t), std::size_t size) {
  std::vector<std::uint64_t> words(size / 8 + 4, kCanary);
  exported(reinterpret_cast<Struct*>(words.data()));
  EXPECT_EQ(words, initialised(sized, size));
  EXPECT_EQ(words[0], size);
  for (std::size_t i = size / 8; i < words.size(); ++i) EXPECT_EQ(words[i], kCanary) << "word " << i;
  // Larger versions have the same beginning and the same rule.
  for (const std::size_t larger : {size + 8, sizeof(Struct), sizeof(Struct) + 16}) {
    const std::vector<std::uint64_t> more = initialised(sized, larger);
    EXPECT_EQ(more[0], larger);
    for (std::size_t i = 1; i < size / 8; ++i) EXPECT_EQ(more[i], words[i]) << larger << " bytes, word " << i;
    for (std::size_t i = sizeof(Struct) / 8; i < larger / 8; ++i) EXPECT_EQ(more[i], 0u) << "word " << i;
    for (std::size_t i = larger / 8; i < more.size(); ++i) EXPECT_EQ(more[i], kCanary) << "word " << i;
  }
  exported(nullptr);
  sized(nullptr, size);
}

TEST(Structs, InitWritesNoMoreThanTheCallersVersion) {
  expect_init_of_0_1<ll_options>(ll_options_init, ll_options_init_sized, 48);
  expect_init_of_0_1<ll_problem>(ll_problem_init, ll_problem_init_sized, 80);
  expect_init_of_0_1<ll_arguments>(ll_arguments_init, ll_arguments_init_sized, 144);
  // In code compiled now the same names initialise the whole.
  ll_options options;
  ll_options_init(&options);
  EXPECT_EQ(options.size, sizeof options);
  EXPECT_EQ(options.clip_low, 0.2);
  EXPECT_EQ(options.beta, 0.5);
  ll_problem problem;
  ll_problem_init(&problem);
  EXPECT_EQ(problem.size, sizeof problem);
  EXPECT_EQ(problem.outputs, 0u);
  ll_arguments arguments;
  ll_arguments_init(&arguments);
  EXPECT_EQ(arguments.size, sizeof arguments);
  EXPECT_EQ(arguments.filter_variance, nullptr);
}

TEST(Structs, ThoseOf01StillRun) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem whole, old;
  ASSERT_EQ(whole.run(context.get()), LL_OK) << ll_last_error();
  old.problem.size = 80;
  old.options.size = 48;
  old.arguments.size = 144;
  std::memset(reinterpret_cast<char*>(&old.problem) + 80, 0x5a, sizeof old.problem - 80);
  std::memset(reinterpret_cast<char*>(&old.options) + 48, 0x5a, sizeof old.options - 48);
  std::memset(reinterpret_cast<char*>(&old.arguments) + 144, 0x5a, sizeof old.arguments - 144);
  ASSERT_EQ(old.run(context.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(old.loss, whole.loss);
  EXPECT_EQ(old.dw, whole.dw);
}

TEST(Structs, GarbageSizesAreRefused) {
  SmallProblem s;
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{8}, std::uint64_t{77}, std::uint64_t{4104},
                                   ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    ll_problem problem = s.problem;
    problem.size = size;
    EXPECT_TRUE(refused(plan_with(&problem, &s.options), LL_ERROR_INVALID_ARGUMENT,
                        {"problem.size: " + std::to_string(size), "sizeof(ll_problem)", "168"}));
    ll_options options = s.options;
    options.size = size;
    EXPECT_TRUE(refused(plan_with(&s.problem, &options), LL_ERROR_INVALID_ARGUMENT,
                        {"options.size: " + std::to_string(size), "sizeof(ll_options)", "176"}));
    ll_context_options context_options;
    ll_context_options_init(&context_options);
    context_options.size = size;
    ll_context* context = nullptr;
    EXPECT_TRUE(refused(ll_context_create(&context_options, &context), LL_ERROR_INVALID_ARGUMENT,
                        {"options.size: " + std::to_string(size), "sizeof(ll_context_options)", "48"}));
    const ContextPointer reference = make_context(LL_BACKEND_REFERENCE);
    const PlanPointer plan = s.plan(reference.get());
    s.x_view.size = size;
    EXPECT_TRUE(refused(s.run(plan.get()), LL_ERROR_INVALID_ARGUMENT,
                        {"hidden.size: " + std::to_string(size), "sizeof(ll_tensor)", "96"}));
    s.x_view.size = sizeof(ll_tensor);
    s.arguments.size = size;
    EXPECT_TRUE(refused(s.run(plan.get()), LL_ERROR_INVALID_ARGUMENT,
                        {"arguments.size: " + std::to_string(size), "sizeof(ll_arguments)", "392"}));
    s.arguments.size = sizeof(ll_arguments);
    EXPECT_TRUE(s.untouched());
  }
}

TEST(Structs, AMissingTailHasItsDefaults) {
  SmallProblem s;
  // Without memory_budget: no limit, although a field beyond the size says 1 byte.
  ll_problem limited = s.problem;
  limited.memory_budget = 1;
  const ContextPointer cpu = make_context(LL_BACKEND_CPU);
  ll_plan* plan = nullptr;
  EXPECT_EQ(ll_plan_create(cpu.get(), &limited, &s.options, &plan), LL_ERROR_BUDGET);
  limited.size = offsetof(ll_problem, memory_budget);
  EXPECT_EQ(ll_plan_create(cpu.get(), &limited, &s.options, &plan), LL_OK) << ll_last_error();
  ll_plan_destroy(plan);

  std::vector<std::uint64_t> shorter = resized(s.problem, offsetof(ll_problem, memory_budget));
  EXPECT_EQ(plan_with(as<ll_problem>(shorter), &s.options), LL_OK) << ll_last_error();

  // Options cut before on_empty: the default is an error, which the last field would have turned off.
  s.options.on_empty = LL_EMPTY_ZERO;
  s.y.assign(4, -100);
  std::vector<std::uint64_t> short_options = resized(s.options, offsetof(ll_options, on_empty));
  const ContextPointer reference = make_context(LL_BACKEND_REFERENCE);
  ASSERT_EQ(ll_plan_create(reference.get(), &s.problem, as<ll_options>(short_options), &plan), LL_OK);
  EXPECT_EQ(s.run(plan), LL_ERROR_EMPTY);
  ll_plan_destroy(plan);
  const PlanPointer whole = s.plan(reference.get());
  EXPECT_EQ(s.run(whole.get()), LL_OK) << ll_last_error();

  // Even a struct of one pair of fields.
  std::vector<std::uint64_t> shortest = resized(s.options, 16);
  EXPECT_EQ(plan_with(&s.problem, as<ll_options>(shortest)), LL_OK) << ll_last_error();

  ll_context_options context_options;
  ll_context_options_init(&context_options);
  context_options.cpu_target = "no such target";
  context_options.size = offsetof(ll_context_options, cpu_target);
  ll_context* context = nullptr;
  EXPECT_EQ(ll_context_create(&context_options, &context), LL_OK) << ll_last_error();
  ll_context_destroy(context);
}

TEST(Structs, ArgumentsWithoutTailStillRun) {
  SmallProblem s;
  s.arguments.size = offsetof(ll_arguments, lse);  // counts are not asked for
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  ASSERT_EQ(s.run(context.get()), LL_OK) << ll_last_error();
  EXPECT_NE(s.loss, static_cast<double>(kSentinel));
  EXPECT_EQ(s.kept, -1);

  // Cut before grad_loss: its default is 1, not 0 and not what lies there.
  SmallProblem whole, cut;
  ASSERT_EQ(whole.run(context.get()), LL_OK);
  cut.arguments.grad_loss = 5.0;
  cut.arguments.size = offsetof(ll_arguments, grad_loss);
  ASSERT_EQ(cut.run(context.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(cut.dx, whole.dx);
  EXPECT_NE(cut.dx[0], kSentinel);
}

TEST(Structs, ALongerTailMustBeZero) {
  SmallProblem s;
  for (const std::size_t extra : {8u, 64u, 2048u}) {
    std::vector<std::uint64_t> longer = resized(s.problem, sizeof(ll_problem) + extra);
    EXPECT_EQ(plan_with(as<ll_problem>(longer), &s.options), LL_OK) << ll_last_error();
    longer.back() = std::uint64_t{1} << 56;  // the very last byte, on little endian
    EXPECT_TRUE(refused(plan_with(as<ll_problem>(longer), &s.options), LL_ERROR_UNSUPPORTED,
                        {"problem.size: " + std::to_string(sizeof(ll_problem) + extra), ll_version(), "must be 0"}));
  }
  std::vector<std::uint64_t> tensor_words = resized(s.w_view, sizeof(ll_tensor) + 16);
  s.arguments.weight = as<ll_tensor>(tensor_words);
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  const PlanPointer plan = s.plan(context.get());
  tensor_words.back() = 1;
  EXPECT_TRUE(refused(s.run(plan.get()), LL_ERROR_UNSUPPORTED, {"weight.size: 112", "must be 0"}));
  EXPECT_TRUE(s.untouched());
  tensor_words.back() = 0;
  EXPECT_EQ(s.run(plan.get()), LL_OK) << ll_last_error();
}

}  // namespace
}  // namespace faces
