// A student's and a teacher's logits side by side, a leaf of 256 columns at a time. Two exponentials an element and
// walk; JSD takes one more, and a logarithm's polynomial.
#pragma once

namespace logitless::cpu::LL_ISA {

inline PairNumbers pair_leaf(const float* z, const float* u, std::int64_t n, float inverse_tau) {
  F32 const by(inverse_tau), least(-INFINITY);
  F32 top_s = least, top_t = least;
  for_lanes(n, [&](std::int64_t i, int count) {
    // The logits come second: a NaN then stays.
    top_s = maximum(top_s, load_some(z + i, count, -INFINITY) * by);
    top_t = maximum(top_t, load_some(u + i, count, -INFINITY) * by);
  });
  PairNumbers out{};
  out.ms = max_of(top_s);
  out.mt = max_of(top_t);
  F32 const ms(reference_of(out.ms)), mt(reference_of(out.mt));
  F32 ss(0.0F), ts = ss, cs = ss, st = ss, tt = ss, ct = ss;
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const gap_s = load_some(z + i, count, -INFINITY) * by - ms,
              gap_t = load_some(u + i, count, -INFINITY) * by - mt;
    F32 const es = exp2_of(gap_s * F32(contract::log2e<float>())), et = exp2_of(gap_t * F32(contract::log2e<float>()));
    ss = ss + es;
    ts = ts + weighted(es, gap_s);
    cs = cs + weighted(es, gap_t);
    st = st + et;
    tt = tt + weighted(et, gap_t);
    ct = ct + weighted(et, gap_s);
  });
  out.ss = sum_of(ss);
  out.ts = sum_of(ts);
  out.cs = sum_of(cs);
  out.st = sum_of(st);
  out.tt = sum_of(tt);
  out.ct = sum_of(ct);
  return out;
}

// log p and log q of n classes to buffers of n.
inline void pair_logs(const float* z, const float* u, std::int64_t n, const PairRow& row, float* log_p, float* log_q) {
  F32 const by(row.inverse_tau), ms(row.ms), mt(row.mt), log_ss(row.log_ss), log_st(row.log_st);
  for_lanes(n, [&](std::int64_t i, int count) {
    store_some((load_some(z + i, count) * by - ms) - log_ss, log_p + i, count);
    store_some((load_some(u + i, count) * by - mt) - log_st, log_q + i, count);
  });
}
inline void pair_mixture(const float* z, const float* u, std::int64_t n, const PairRow& row, float* p_sum,
                         float* q_sum) {
  alignas(64) float log_p[leaf_columns], log_q[leaf_columns];
  pair_logs(z, u, n, row, log_p, log_q);
  F32 const log_beta(row.log_beta), log_rest(row.log_rest), log2e(contract::log2e<float>());
  F32 of_p(0.0F), of_q(0.0F);
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const lp = load_some(log_p + i, count, -INFINITY), lq = load_some(log_q + i, count, -INFINITY);
    F32 const t = lq - lp, ratio = contract::mixed_log_ratio(t, log_beta, log_rest);
    of_p = of_p + weighted(exp2_of(lp * log2e), ratio);
    // Where p is 0, mix is beta q.
    of_q = of_q + weighted(exp2_of(lq * log2e), if_equal(lp, F32(-INFINITY), F32(0.0F) - log_beta, t + ratio));
  });
  *p_sum = sum_of(of_p);
  *q_sum = sum_of(of_q);
}

inline void pair_gradient(const float* z, const float* u, std::int64_t n, const PairRow& row, float* d) {
  alignas(64) float log_p[leaf_columns], log_q[leaf_columns];
  pair_logs(z, u, n, row, log_p, log_q);
  F32 const g(row.g), k(row.k), slope(row.slope), masked(-INFINITY), zero(0.0F), rest(row.rest);
  F32 const log_beta(row.log_beta), log_rest(row.log_rest), log2e(contract::log2e<float>());
  auto const each = [&](auto element) {
    for_lanes(n, [&](std::int64_t i, int count) {
      F32 const x = load_some(z + i, count), lp = load_some(log_p + i, count), lq = load_some(log_q + i, count);
      F32 add = element(lp, lq, exp2_of(lp * log2e)) * g;
      if (row.slope != 0.0F) add = if_equal(x, masked, zero, add * contract::softcap_slope(x, slope));
      store_some(load_some(d + i, count) + add, d + i, count);
    });
  };
  switch (row.divergence) {
    case contract::Divergence::forward_kl:
      return each([&](F32, F32 lq, F32 p) { return contract::forward_element(p, exp2_of(lq * log2e)); });
    case contract::Divergence::reverse_kl:
      return each(
          [&](F32 lp, F32 lq, F32 p) { return if_equal(p, zero, zero, contract::reverse_element(p, lp - lq, k)); });
    case contract::Divergence::jsd:
      return each([&](F32 lp, F32 lq, F32 p) {
        F32 const ratio = contract::mixed_log_ratio(lq - lp, log_beta, log_rest);
        return if_equal(p, zero, zero, contract::jsd_element(p, ratio, rest, k));
      });
  }
}

}  // namespace logitless::cpu::LL_ISA
