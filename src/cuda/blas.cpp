// See blas.hpp.
#include "cuda/blas.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "cuda/lt_api.hpp"

namespace logitless::cuda {
namespace {

struct Library {
  lt::Functions functions{};
  std::string path;  // as it was asked for
  std::string why;   // not loaded: what was tried
};

template <class F>
bool take(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

bool take_all(void* library, lt::Functions* f) {
  return take(library, "cublasLtCreate", &f->create) && take(library, "cublasLtDestroy", &f->destroy) &&
         take(library, "cublasLtGetVersion", &f->version) &&
         take(library, "cublasLtMatmulDescCreate", &f->desc_create) &&
         take(library, "cublasLtMatmulDescDestroy", &f->desc_destroy) &&
         take(library, "cublasLtMatmulDescSetAttribute", &f->desc_set) &&
         take(library, "cublasLtMatrixLayoutCreate", &f->layout_create) &&
         take(library, "cublasLtMatrixLayoutDestroy", &f->layout_destroy) &&
         take(library, "cublasLtMatmulPreferenceCreate", &f->preference_create) &&
         take(library, "cublasLtMatmulPreferenceDestroy", &f->preference_destroy) &&
         take(library, "cublasLtMatmulPreferenceSetAttribute", &f->preference_set) &&
         take(library, "cublasLtMatmulAlgoGetHeuristic", &f->heuristic) && take(library, "cublasLtMatmul", &f->matmul);
}

// One that the process has loaded already (torch's), then the caller's choice, the loader's, and the toolkit's place.
Library load() {
  Library out;
  const char* const named = std::getenv("LOGITLESS_CUBLASLT");
  struct Place {
    std::string path;
    int flags;
  };
  std::array<Place, 6> const places{{{named != nullptr ? named : "", RTLD_NOW | RTLD_LOCAL},
                                     {"libcublasLt.so.13", RTLD_NOW | RTLD_NOLOAD},
                                     {"libcublasLt.so.12", RTLD_NOW | RTLD_NOLOAD},
                                     {"libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL},
                                     {"/usr/local/cuda/lib64/libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL},
                                     {"libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL}}};
  for (Place const& place : places) {
    if (place.path.empty()) continue;
    void* const library = dlopen(place.path.c_str(), place.flags);
    if (library == nullptr) {
      if ((place.flags & RTLD_NOLOAD) == 0) out.why += (out.why.empty() ? "" : "; ") + std::string(dlerror());
      continue;
    }
    if (take_all(library, &out.functions)) {
      out.path = place.path;
      out.why.clear();
      return out;
    }
    out.why += (out.why.empty() ? "" : "; ") + place.path + " lacks a function of cuBLASLt";
  }
  return out;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

int type_of(contract::DType t) {
  return t == contract::DType::bf16 ? lt::real_bf16 : t == contract::DType::f16 ? lt::real_f16 : lt::real_f32;
}

int alignment_of(const void* p) {
  auto const address = reinterpret_cast<std::uintptr_t>(p);
  return address % 16 == 0 ? 16 : address % 8 == 0 ? 8 : address % 4 == 0 ? 4 : 2;
}

std::string text_of(const Product& p) {
  return std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.k) + ", strides " +
         std::to_string(p.lda) + ", " + std::to_string(p.ldb) + ", " + std::to_string(p.ldc) + ", " +
         contract::name_of(p.operand) + " to " + contract::name_of(p.out);
}

}  // namespace

// Descriptors in cuBLASLt's column-major reading, where row-major C [m,n] is a matrix of n rows and m columns.
struct Blas::Resolved {
  lt::Object desc = nullptr, a = nullptr, b = nullptr, c = nullptr;  // a: our B, b: our A
  lt::Heuristic best{};

  Resolved() = default;
  Resolved(const Resolved&) = delete;
  Resolved& operator=(const Resolved&) = delete;
  ~Resolved() {
    lt::Functions const& f = library().functions;
    if (desc != nullptr) f.desc_destroy(desc);
    for (lt::Object layout : {a, b, c})
      if (layout != nullptr) f.layout_destroy(layout);
  }
};

std::unique_ptr<Blas> Blas::open(std::string* why) {
  Library const& l = library();
  if (l.path.empty()) {
    *why = "cuBLASLt was not found (" + l.why +
           "); install CUDA's libraries or the PyPI package nvidia-cublas, or name the file in LOGITLESS_CUBLASLT";
    return nullptr;
  }
  void* handle = nullptr;
  if (int const error = l.functions.create(&handle); error != lt::success) {
    *why = "cublasLtCreate failed with status " + std::to_string(error);
    return nullptr;
  }
  return std::unique_ptr<Blas>(new Blas(handle));
}

Blas::~Blas() { library().functions.destroy(handle_); }

std::string Blas::description() {
  Library const& l = library();
  if (l.path.empty()) return "cuBLASLt not found: " + l.why;
  return l.path + ", version " + std::to_string(l.functions.version());
}

Products::Products(Blas& blas, std::int64_t workspace_bytes) : blas_(blas), workspace_bytes_(workspace_bytes - 256) {}
Products::~Products() = default;

std::pair<const Blas::Resolved*, std::string> Products::find(const Product& p, Alignment alignment) {
  std::lock_guard const guard(lock_);
  std::pair const key{p, alignment};
  if (auto const at = resolved_.find(key); at != resolved_.end()) return {at->second.get(), ""};
  lt::Functions const& f = library().functions;
  auto made = std::make_unique<Blas::Resolved>();
  bool good = f.desc_create(&made->desc, lt::compute_f32, lt::real_f32) == lt::success;
  auto set = [&](int attribute, std::int32_t value) {
    good = good && f.desc_set(made->desc, attribute, &value, sizeof value) == lt::success;
  };
  set(lt::desc_pointer_mode, lt::pointer_mode_device);
  // Ours -> theirs: their A is our B, their B our A.
  set(lt::desc_transpose_a, p.form == Form::logits ? lt::op_transpose : lt::op_none);
  set(lt::desc_transpose_b, p.form == Form::weight ? lt::op_transpose : lt::op_none);
  auto layout = [&](lt::Object* out, contract::DType type, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    good = good && f.layout_create(out, type_of(type), static_cast<std::uint64_t>(cols),
                                   static_cast<std::uint64_t>(rows), ld) == lt::success;
  };
  // Rows and columns here are row-major ones of our matrices.
  if (p.form == Form::logits)
    layout(&made->a, p.operand, p.n, p.k, p.ldb);
  else
    layout(&made->a, p.operand, p.k, p.n, p.ldb);
  if (p.form == Form::weight)
    layout(&made->b, p.operand, p.k, p.m, p.lda);
  else
    layout(&made->b, p.operand, p.m, p.k, p.lda);
  layout(&made->c, p.out, p.m, p.n, p.ldc);
  lt::Object preference = nullptr;
  good = good && f.preference_create(&preference) == lt::success;
  if (good) {
    auto const bytes = static_cast<std::size_t>(workspace_bytes_);
    f.preference_set(preference, lt::pref_workspace_bytes, &bytes, sizeof bytes);
    for (auto const& [attribute, value] : {std::pair{lt::pref_alignment_a, alignment.b},
                                           {lt::pref_alignment_b, alignment.a},
                                           {lt::pref_alignment_c, alignment.c},
                                           {lt::pref_alignment_d, alignment.c}}) {
      auto const least = static_cast<std::uint32_t>(value);
      f.preference_set(preference, attribute, &least, sizeof least);
    }
    int found = 0;
    int const status =
        f.heuristic(blas_.handle_, made->desc, made->a, made->b, made->c, made->c, preference, 1, &made->best, &found);
    good = status == lt::success && found > 0;
  }
  if (preference != nullptr) f.preference_destroy(preference);
  if (!good) return {nullptr, "cuBLASLt has no algorithm for a product of " + text_of(p)};
  auto const [at, fresh] = resolved_.emplace(key, std::move(made));
  return {at->second.get(), ""};
}

std::string Products::launch(const Product& p, const void* a, const void* b, void* c, const float* alpha,
                             const float* beta, void* workspace, void* stream) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return {};
  // cuBLASLt wants its workspace aligned to 256 bytes; the caller's is to 64.
  auto const room = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(workspace) + 255) / 256 * 256);
  auto const [resolved, why] = find(p, {alignment_of(a), alignment_of(b), alignment_of(c)});
  if (resolved == nullptr) return why;
  int const status = library().functions.matmul(blas_.handle_, resolved->desc, alpha, b, resolved->a, a, resolved->b,
                                                beta, c, resolved->c, c, resolved->c, &resolved->best.algorithm, room,
                                                static_cast<std::size_t>(workspace_bytes_), stream);
  if (status != lt::success)
    return "cublasLtMatmul failed with status " + std::to_string(status) + " for a product of " + text_of(p);
  return {};
}

}  // namespace logitless::cuda
