// Ten lines of text, and an HTML page whose charts are drawn here as SVG: axes, curves, bars and dots in a few helpers.
//
// Colours mean the same thing everywhere: blue is Logitless, orange the dense baseline. Every chart names its units and
// says in a sentence what to see; numbers that matter are written out, so that nothing depends on reading a curve.
#include "report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <functional>

namespace tiny_lm {
namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(static_cast<std::size_t>(std::max(length, 0)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string milliseconds(double seconds) { return format(seconds < 0.01 ? "%.1f ms" : "%.0f ms", seconds * 1e3); }

double outside_of(const StepRecord& dense) { return dense.head - dense.products; }
double step_seconds(const StepRecord& s) { return s.body + s.head + s.adam; }

// ---- axes -----------------------------------------------------------------------------------------------------------------

// A range of numbers onto a range of pixels, linear or logarithmic.
struct Scale {
  double low, high, from, to;
  bool logarithmic = false;
  double operator()(double value) const {
    const double share = logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return from + share * (to - from);
  }
};

// Round steps of 1, 2 or 5 times a power of ten, about `count` of them.
std::vector<double> round_ticks(double low, double high, int count) {
  const double raw = (high - low) / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  const double step = power * (raw / power < 1.5 ? 1 : raw / power < 3.5 ? 2 : raw / power < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  const auto first = static_cast<std::int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<std::int64_t>(std::floor(high / step + 1e-9));
  for (std::int64_t k = first; k <= last; ++k) ticks.push_back(static_cast<double>(k) * step);
  return ticks;
}

std::vector<double> power_ticks(double low, double high) {
  std::vector<double> ticks;
  const auto first = static_cast<int>(std::ceil(std::log10(low) - 1e-9));
  const auto last = static_cast<int>(std::floor(std::log10(high) + 1e-9));
  for (int e = first; e <= last; ++e) ticks.push_back(std::pow(10.0, e));
  return ticks;
}

std::string power_label(double value) {
  return format("10<tspan dy='-5' font-size='9'>%d</tspan>", static_cast<int>(std::lround(std::log10(value))));
}

class Drawing {
 public:
  Drawing(int width, int height, const std::string& label)
      : svg_(format("<svg viewBox='0 0 %d %d' role='img' aria-label='%s'>\n", width, height, label.c_str())) {}

  void line(double x1, double y1, double x2, double y2, const char* kind) {
    svg_ += format("<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' class='%s'/>\n", x1, y1, x2, y2, kind);
  }
  void text(double x, double y, const std::string& words, const char* kind) {
    svg_ += format("<text x='%.1f' y='%.1f' class='%s'>", x, y, kind) + words + "</text>\n";
  }
  void rectangle(double x, double y, double width, double height, const char* kind) {
    svg_ += format("<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' class='%s'/>\n", x, y, std::max(width, 0.0),
                   height, kind);
  }
  void dot(double x, double y, double radius, const char* kind) {
    svg_ += format("<circle cx='%.1f' cy='%.1f' r='%.1f' class='%s'/>\n", x, y, radius, kind);
  }
  void curve(const std::vector<std::pair<double, double>>& points, const char* kind) {
    svg_ += format("<polyline class='%s' points='", kind);
    for (const auto& [x, y] : points) svg_ += format("%.1f,%.1f ", x, y);
    svg_ += "'/>\n";
  }
  void horizontal_grid(const Scale& y, double left, double right, const std::vector<double>& ticks,
                       const std::function<std::string(double)>& label) {
    for (const double tick : ticks) {
      line(left, y(tick), right, y(tick), "grid");
      text(left - 8, y(tick) + 4, label(tick), "tick end");
    }
  }
  void bottom_axis(const Scale& x, double at, const std::vector<double>& ticks,
                   const std::function<std::string(double)>& label, const std::string& name) {
    line(x.from, at, x.to, at, "axis");
    for (const double tick : ticks) {
      line(x(tick), at, x(tick), at + 4, "axis");
      text(x(tick), at + 18, label(tick), "tick middle");
    }
    text((x.from + x.to) / 2, at + 36, name, "name middle");
  }
  std::string end() const { return svg_ + "</svg>\n"; }

 private:
  std::string svg_;
};

std::string plain(double value) { return format("%g", value); }

// ---- charts ---------------------------------------------------------------------------------------------------------------

std::string loss_chart(const Findings& f) {
  constexpr double left = 64, right = 850, top = 16, bottom = 290;
  const auto steps = static_cast<double>(f.logitless_loss.size());
  double low = 1e9, high = -1e9;
  for (const auto* losses : {&f.logitless_loss, &f.dense_loss}) {
    for (const double loss : *losses) {
      low = std::min(low, loss);
      high = std::max(high, loss);
    }
  }
  const double room = std::max(0.05 * (high - low), 1e-3);
  const Scale x{0, std::max(steps, 2.0), left, right}, y{low - room, high + room, bottom, top};
  Drawing d(960, 500, "loss by step");
  d.horizontal_grid(y, left, right, round_ticks(y.low, y.high, 5), plain);
  const auto points = [&](const std::vector<double>& losses) {
    std::vector<std::pair<double, double>> out;
    out.reserve(losses.size());
    for (std::size_t i = 0; i < losses.size(); ++i) out.emplace_back(x(static_cast<double>(i + 1)), y(losses[i]));
    return out;
  };
  d.curve(points(f.dense_loss), "curve dense wide");
  d.curve(points(f.logitless_loss), "curve ours");
  d.text(left, top - 4, "loss, nats a token", "name");
  const double legend = right - 250;
  d.line(legend, top + 14, legend + 30, top + 14, "curve dense wide");
  d.text(legend + 38, top + 18, format("dense, %.4f at the end", f.dense_loss.back()), "label");
  d.line(legend, top + 34, legend + 30, top + 34, "curve ours");
  d.text(legend + 38, top + 38, format("Logitless, %.4f at the end", f.logitless_loss.back()), "label");

  // Below, on the same steps: the difference, in powers of ten. Exact agreement lies on the floor.
  constexpr double top2 = 340, bottom2 = 450, floor = 1e-8;
  const double most = std::max(f.largest_difference(), 1e-6);
  const Scale y2{floor, std::pow(10, std::ceil(std::log10(most))), bottom2, top2, true};
  d.horizontal_grid(y2, left, right, power_ticks(y2.low, y2.high), power_label);
  std::vector<std::pair<double, double>> difference;
  for (std::size_t i = 0; i < f.logitless_loss.size(); ++i) {
    const double apart = std::abs(f.logitless_loss[i] - f.dense_loss[i]);
    difference.emplace_back(x(static_cast<double>(i + 1)), y2(std::max(apart, floor)));
  }
  d.curve(difference, "curve neutral");
  d.text(left, top2 - 8, "|difference| of the two losses", "name");
  d.bottom_axis(x, bottom2, round_ticks(x.low, x.high, 8), plain, "step");
  return d.end();
}

std::string time_chart(const Findings& f) {
  constexpr double left = 104, right = 850;
  const double most = std::max(step_seconds(f.logitless_step), step_seconds(f.dense_step));
  const Scale x{0, most * 1e3 * 1.16, left, right};
  Drawing d(960, 216, "time of a step, body and head");
  const auto ticks = round_ticks(x.low, x.high, 8);
  for (const double tick : ticks) d.line(x(tick), 34, x(tick), 158, "grid");
  const auto bar = [&](double y, const char* name, const StepRecord& s, double products, const char* strong,
                       const char* weak) {
    double at = 0;
    const auto piece = [&](double seconds, const char* kind, const char* label, const char* label_kind) {
      const double from = x(at * 1e3), to = x((at + seconds) * 1e3);
      d.rectangle(from, y, to - from - 1.5, 38, kind);
      const std::string words = std::string(label) + " " + milliseconds(seconds);
      if (to - from > 7.0 * static_cast<double>(words.size())) d.text((from + to) / 2, y + 24, words, label_kind);
      at += seconds;
    };
    d.text(left - 10, y + 24, name, "label end");
    piece(s.body, "body", "body", "inside middle");
    piece(s.adam, "adam", "Adam", "inside middle");
    piece(products, strong, "head: products", "inside light middle");
    piece(s.head - products, weak, "rest", "inside middle");
    d.text(x(at * 1e3) + 8, y + 24, milliseconds(at), "label");
  };
  const double share = f.logitless_split.products / (f.logitless_split.products + f.logitless_split.outside);
  bar(44, "Logitless", f.logitless_step, f.logitless_step.head * share, "ours-fill", "ours-weak");
  bar(108, "dense", f.dense_step, f.dense_step.products, "dense-fill", "dense-weak");
  d.bottom_axis(x, 158, ticks, plain, "milliseconds of a step (median)");
  double at = left;
  struct Key {
    const char *kind, *words;
    double width;
  };
  for (const Key& key :
       {Key{"body", "body", 80}, Key{"adam", "Adam", 84}, Key{"ours-fill", "head, matrix products", 190},
        Key{"ours-weak", "head, everything else", 0}}) {
    d.rectangle(at, 8, 12, 12, key.kind);
    d.text(at + 18, 18, key.words, "tick");
    at += key.width;
  }
  return d.end();
}

std::string memory_chart(const Findings& f) {
  constexpr double left = 84, right = 730, top = 24, bottom = 300;
  double low = 1e18, high = 0;
  for (const MemoryPoint& p : f.memory) {
    for (const double bytes : {p.dense, p.logitless, p.logitless_budgeted}) {
      if (bytes <= 0) continue;
      low = std::min(low, bytes);
      high = std::max(high, bytes);
    }
  }
  low = std::exp2(std::floor(std::log2(low)));
  high = std::exp2(std::ceil(std::log2(high)));
  const Scale x{static_cast<double>(f.memory.front().rows) / 1.2, static_cast<double>(f.memory.back().rows) * 1.2, left,
                right, true};
  const Scale y{low, high, bottom, top, true};
  Drawing d(960, 350, "peak extra memory of the head by rows");
  std::vector<double> ticks;
  const auto doublings = static_cast<int>(std::lround(std::log2(high / low)));
  for (int k = 0; k <= doublings; k += doublings > 6 ? 2 : 1) ticks.push_back(std::ldexp(low, k));
  d.horizontal_grid(y, left, right, ticks, [](double bytes) { return bytes_text(bytes); });
  std::vector<double> rows;
  rows.reserve(f.memory.size());
  for (const MemoryPoint& p : f.memory) rows.push_back(static_cast<double>(p.rows));
  d.bottom_axis(x, bottom, rows, plain, "R, tokens of a step");
  d.text(left, top - 10, "peak beside inputs and outputs", "name");

  struct Series {
    double MemoryPoint::* field;
    std::string name;
    const char *curve, *mark;
    double label_y = 0;
  };
  std::array<Series, 3> all{
      {{&MemoryPoint::dense, "dense", "curve dense", "dense-fill"},
       {&MemoryPoint::logitless, "Logitless, no limit", "curve ours dashed", "ours-fill"},
       {&MemoryPoint::logitless_budgeted, "Logitless, budget " + bytes_text(static_cast<double>(f.options.budget)),
        "curve ours", "ours-fill"}}};
  double above = -100;  // labels at the right end keep 34 pixels apart
  for (Series& series : all) {
    std::vector<std::pair<double, double>> points;
    double last = 0;
    for (const MemoryPoint& p : f.memory) {
      if (p.*series.field <= 0) continue;
      last = p.*series.field;
      points.emplace_back(x(static_cast<double>(p.rows)), y(last));
    }
    if (points.empty()) continue;
    d.curve(points, series.curve);
    for (const auto& [px, py] : points) d.dot(px, py, 4, series.mark);
    series.label_y = std::max(points.back().second, above + 34);
    above = series.label_y;
    d.text(points.back().first + 14, series.label_y, series.name, "label");
    d.text(points.back().first + 14, series.label_y + 15,
           bytes_text(last) + " at R = " + number_text(f.memory.back().rows), "tick");
  }
  return d.end();
}

std::string error_chart(const Findings& f) {
  constexpr double left = 150, right = 780;
  const GradientError &ours = f.errors.logitless, &dense = f.errors.dense;
  double low = 1, high = 0;
  for (const double e : {ours.dx, ours.dw, dense.dx, dense.dw}) {
    low = std::min(low, e);
    high = std::max(high, e);
  }
  const double unit = f.options.bf16() ? 0x1p-9 : 0x1p-24;  // half a unit in the last place
  low = std::pow(10, std::floor(std::log10(std::max(std::min(low, unit), 1e-12))));
  high = std::pow(10, std::ceil(std::log10(std::max(high, unit))));
  const Scale x{low, high, left, right, true};
  Drawing d(960, 190, "relative error of gradients against double");
  for (const double tick : power_ticks(low, high)) d.line(x(tick), 20, x(tick), 130, "grid");
  d.line(x(unit), 14, x(unit), 130, "limit");
  d.text(x(unit), 10, f.options.bf16() ? "rounding of bf16" : "rounding of fp32", "tick middle");
  const auto row = [&](double y, const char* name, double a, double b) {
    d.text(left - 14, y + 4, name, "label end");
    d.line(x(std::min(a, b)), y, x(std::max(a, b)), y, "axis");
    d.dot(x(b), y, 7, "dense-fill");
    d.dot(x(a), y, 7, "ours-fill");
    d.text(std::max(x(a), x(b)) + 16, y + 4, format("Logitless %.1e, dense %.1e", a, b), "tick");
  };
  row(50, "dX", ours.dx, dense.dx);
  row(96, "dW", ours.dw, dense.dw);
  d.bottom_axis(x, 130, power_ticks(low, high), power_label, "relative error, ‖g − double‖ / ‖double‖");
  return d.end();
}

// ---- page -----------------------------------------------------------------------------------------------------------------

constexpr const char* style = R"(
:root { --paper:#ffffff; --card:#f7f8fa; --ink:#1c2430; --soft:#5b6675; --grid:#e3e7ec; --axis:#9aa5b3;
  --ours:#1f6fd0; --ours-weak:#a9cdf5; --dense:#d9741a; --dense-weak:#f6cfa6; --body:#c3cad3; --adam:#dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --paper:#14181e; --card:#1c222b; --ink:#e8ecf1; --soft:#9aa6b5;
  --grid:#2a323d; --axis:#5c6878; --ours:#62a8f5; --ours-weak:#2d5a8f; --dense:#f0964a; --dense-weak:#85501f;
  --body:#4a5563; --adam:#353e4a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,
  'Liberation Sans','DejaVu Sans',sans-serif; }
main { max-width:1000px; margin:0 auto; padding:40px 24px 64px; }
h1 { font-size:30px; line-height:1.2; margin:0 0 8px; letter-spacing:-0.01em; }
h2 { font-size:19px; margin:44px 0 4px; }
p { margin:4px 0 12px; max-width:78ch; } .soft { color:var(--soft); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(200px,1fr)); gap:14px; margin:26px 0 8px; }
.tile { background:var(--card); border-radius:10px; padding:16px 18px; }
.tile b { display:block; font-size:27px; line-height:1.25; font-weight:650; letter-spacing:-0.01em; }
.tile span { color:var(--soft); font-size:14px; display:block; line-height:1.4; }
svg { width:100%; height:auto; display:block; margin:10px 0 0; overflow:visible; }
svg text { font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans','DejaVu Sans',sans-serif; }
svg text.tick { fill:var(--soft); } svg text.name { fill:var(--soft); font-size:13px; } svg text.label { fill:var(--ink); font-size:13.5px; }
svg text.inside { fill:var(--ink); font-size:12.5px; } svg text.light { fill:#fff; }
.middle { text-anchor:middle; } .end { text-anchor:end; }
.grid { stroke:var(--grid); } .axis { stroke:var(--axis); } .limit { stroke:var(--soft); stroke-dasharray:3 4; }
.curve { fill:none; stroke-width:1.6; stroke-linejoin:round; } .wide { stroke-width:5; opacity:.5; stroke-linecap:round; }
.curve.ours { stroke:var(--ours); } .curve.dense { stroke:var(--dense); } .curve.neutral { stroke:var(--soft); stroke-width:1.2; }
.dashed { stroke-dasharray:6 5; }
.ours-fill { fill:var(--ours); } .ours-weak { fill:var(--ours-weak); } .dense-fill { fill:var(--dense); } .dense-weak { fill:var(--dense-weak); }
.body { fill:var(--body); } .adam { fill:var(--adam); }
table { border-collapse:collapse; margin:10px 0; font-variant-numeric:tabular-nums; }
th,td { padding:6px 18px 6px 0; text-align:right; border-bottom:1px solid var(--grid); font-size:15px; }
th { color:var(--soft); font-weight:500; } th:first-child,td:first-child { text-align:left; }
blockquote { margin:10px 0; padding:2px 0 2px 16px; border-left:3px solid var(--ours-weak); font-family:Georgia,'Liberation Serif',
  'DejaVu Serif',serif; font-size:17px; }
pre { background:var(--card); border-radius:10px; padding:14px 16px; overflow-x:auto; font-size:13.5px; line-height:1.6; }
)";

std::string tile(const std::string& number, const std::string& words) {
  return "<div class='tile'><b>" + number + "</b><span>" + words + "</span></div>\n";
}

std::string perplexity_table(const Findings& f) {
  std::string out =
      "<table><tr><th>step</th><th>Logitless</th><th>dense</th><th>relative difference</th>"
      "<th>token accuracy</th><th>mean entropy, nats</th></tr>\n";
  for (std::size_t i = 0; i < f.logitless_perplexity.size() && i < f.dense_perplexity.size(); ++i) {
    const double a = f.logitless_perplexity[i].perplexity, b = f.dense_perplexity[i].perplexity;
    out += format("<tr><td>%s</td><td>%.2f</td><td>%.2f</td><td>%.1e</td><td>%.2f %%</td><td>%.3f</td></tr>\n",
                  number_text(f.logitless_perplexity[i].step).c_str(), a, b, std::abs(a - b) / b,
                  100 * f.logitless_perplexity[i].accuracy, f.logitless_perplexity[i].entropy);
  }
  return out + "</table>\n";
}

std::string memory_table(const Findings& f) {
  std::string out = "<table><tr><th>R</th><th>dense</th><th>Logitless, no limit</th><th>Logitless, budget " +
                    bytes_text(static_cast<double>(f.options.budget)) + "</th></tr>\n";
  const auto cell = [](double bytes) { return bytes > 0 ? bytes_text(bytes) : std::string("not measured"); };
  for (const MemoryPoint& p : f.memory) {
    out += "<tr><td>" + number_text(p.rows) + "</td><td>" + cell(p.dense) + "</td><td>" + cell(p.logitless) +
           "</td><td>" + cell(p.logitless_budgeted) + "</td></tr>\n";
  }
  return out + "</table>\n";
}

}  // namespace

double Findings::largest_difference() const {
  double most = 0;
  for (std::size_t i = 0; i < logitless_loss.size(); ++i)
    most = std::max(most, std::abs(logitless_loss[i] - dense_loss[i]));
  return most;
}

const MemoryPoint* Findings::memory_at(std::int64_t rows) const {
  for (const MemoryPoint& point : memory) {
    if (point.rows == rows) return &point;
  }
  return nullptr;
}

std::vector<std::string> ten_lines(const Findings& f, const std::filesystem::path& report) {
  const StepRecord &ours = f.logitless_step, &dense = f.dense_step;
  const MemoryPoint& last = f.memory.back();
  const MemoryPoint& own = f.memory_at(f.options.rows) != nullptr ? *f.memory_at(f.options.rows) : last;
  const auto memory = [&](const MemoryPoint& p) {
    return format("R = %s: Logitless %s (no limit: %s), dense %s", number_text(p.rows).c_str(),
                  p.logitless_budgeted > 0 ? bytes_text(p.logitless_budgeted).c_str() : "over its budget",
                  bytes_text(p.logitless).c_str(), p.dense > 0 ? bytes_text(p.dense).c_str() : "not measured");
  };
  return {
      "text        " + f.text_source + ": " + f.text_size,
      format("model       the last %lld tokens, H = %lld, V = %s: %s parameters; %s steps of %s tokens, twice",
             static_cast<long long>(f.sizes.context), static_cast<long long>(f.sizes.hidden),
             number_text(f.sizes.vocab).c_str(), number_text(f.sizes.parameters()).c_str(),
             number_text(static_cast<std::int64_t>(f.logitless_loss.size())).c_str(),
             number_text(f.options.rows).c_str()),
      format("loss        Logitless %.5f, dense %.5f; largest difference of any step %.1e", f.logitless_loss.back(),
             f.dense_loss.back(), f.largest_difference()),
      format("held out    perplexity Logitless %.2f, dense %.2f; token accuracy %.2f %% and %.2f %%; mean entropy %.3f "
             "and "
             "%.3f nats",
             f.logitless_perplexity.back().perplexity, f.dense_perplexity.back().perplexity,
             100 * f.logitless_perplexity.back().accuracy, 100 * f.dense_perplexity.back().accuracy,
             f.logitless_perplexity.back().entropy, f.dense_perplexity.back().entropy),
      format("step        Logitless %s = body %s + Adam %s + head %s; dense %s = body %s + Adam %s + head %s",
             milliseconds(step_seconds(ours)).c_str(), milliseconds(ours.body).c_str(), milliseconds(ours.adam).c_str(),
             milliseconds(ours.head).c_str(), milliseconds(step_seconds(dense)).c_str(),
             milliseconds(dense.body).c_str(), milliseconds(dense.adam).c_str(), milliseconds(dense.head).c_str()),
      format("head        Logitless %.0f GFLOP/s in products (%s, %.2f RHV) and %s outside; dense %.0f (%s) and %s, "
             "and takes %.2f x the time",
             f.logitless_split.gflops, f.plan.target.c_str(), f.plan.rhv,
             milliseconds(f.logitless_split.outside).c_str(), f.dense_flops / dense.products * 1e-9, name_of(f.kernel),
             milliseconds(outside_of(dense)).c_str(), f.head_speedup()),
      "memory      " + memory(own),
      "            " + memory(last),
      format("gradients   error against double: dX Logitless %.1e, dense %.1e; dW Logitless %.1e, dense %.1e",
             f.errors.logitless.dx, f.errors.dense.dx, f.errors.logitless.dw, f.errors.dense.dw),
      format("report      %s (the run took %.0f s, peak %s)", report.string().c_str(), f.seconds,
             bytes_text(f.process_peak).c_str())};
}

std::string html(const Findings& f) {
  const MemoryPoint& last = f.memory.back();
  const StepRecord &ours = f.logitless_step, &dense = f.dense_step;
  std::string page =
      "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width,initial-scale=1'>\n"
      "<title>Logitless: a language model trained twice</title>\n<style>";
  page += style;
  page += "</style></head><body><main>\n<h1>One model, trained twice</h1>\n";
  page += "<p class='soft'>The same language model from the same seed on " + escaped(f.text_source) +
          ": once with Logitless, which never holds the logits, and once with dense logits and the classical kernels "
          "softmax, "
          "log and NLL.</p>\n<div class='tiles'>\n";
  page += tile(format("%.1e", f.largest_difference()),
               "largest difference of the two losses over " +
                   number_text(static_cast<std::int64_t>(f.logitless_loss.size())) + " steps");
  page += tile(format("%.2f ×", f.head_speedup()),
               "the dense head takes " + milliseconds(dense.head) + " a step, Logitless " + milliseconds(ours.head));
  if (last.dense > 0 && last.logitless_budgeted > 0) {
    page += tile(format("%.0f ×", last.dense / last.logitless_budgeted),
                 "less memory at R = " + number_text(last.rows) + ": " + bytes_text(last.logitless_budgeted) +
                     " instead of " + bytes_text(last.dense));
  }
  page += tile(format("%.1f", f.logitless_perplexity.back().perplexity),
               format("held-out perplexity; dense %.1f", f.dense_perplexity.back().perplexity));
  page += "</div>\n";

  page +=
      "<h2>The losses agree</h2>\n<p>Loss of each step on its own batch. The blue curve runs inside the orange band; "
      "below, what "
      "is left between them (floor 10⁻⁸): the rounding of fp32.</p>\n" +
      loss_chart(f);
  page += "<h2>Held-out perplexity</h2>\n" + perplexity_table(f);

  page += "<h2>Time of a step</h2>\n<p>Body and Adam are the same code for both. " +
          format(
              "The dense head multiplies at %.0f GFLOP/s (%s) and spends %s in its six other kernels. Logitless "
              "multiplies at %.0f GFLOP/s "
              "(%s, C = %s rows a chunk, f = %.2f, %.2f RHV flops) with %s for everything else.",
              f.dense_flops / dense.products * 1e-9, name_of(f.kernel), milliseconds(outside_of(dense)).c_str(),
              f.logitless_split.gflops, f.plan.target.c_str(), number_text(f.plan.chunk).c_str(), f.plan.kept,
              f.plan.rhv, milliseconds(f.logitless_split.outside).c_str()) +
          "</p>\n" + time_chart(f);
  page +=
      "<p class='soft'>The dense head's products are timed one by one. Inside Logitless everything is fused; its share "
      "of products "
      "comes from timing the head at H and 2H, as the rest does not depend on H." +
      (f.speed.openblas > 0
           ? format(" Of the kernels at hand the dense head has the faster: Eigen %.0f, OpenBLAS %.0f GFLOP/s.",
                    f.speed.eigen, f.speed.openblas)
           : std::string(" OpenBLAS was not found when this was built, so the dense head multiplies by Eigen.")) +
      "</p>\n";

  page +=
      "<h2>Memory of the head</h2>\n<p>Peak resident memory that one step of the head needs beside its inputs and "
      "outputs, each "
      "measured in a process of its own. The dense head holds three R × V arrays. Logitless trades memory for time "
      "only when asked: "
      "without a limit it takes the fastest plan, with a budget it stays below it at any R.</p>\n" +
      memory_chart(f) + memory_table(f);

  page += "<h2>Gradients against double</h2>\n<p>The final model's gradients of " + number_text(f.errors.rows) +
          " held-out tokens, against Logitless' double-precision reference.</p>\n" + error_chart(f);

  page += "<h2>What it writes</h2>\n";
  for (const std::string& sentence : f.sentences) page += "<blockquote>" + escaped(sentence) + "</blockquote>\n";

  page +=
      "<h2>The run</h2>\n<p>" + escaped(f.text_source) + ": " + escaped(f.text_size) + ".<br>" +
      format(
          "Neural n-gram after Bengio (2003): the last %lld tokens, H = %lld, inner layer %lld, V = %s, %s parameters, "
          "embedding "
          "and head weight tied. %s steps of %s tokens, Adam at %g, %s head operands, seed %lld.<br>",
          static_cast<long long>(f.sizes.context), static_cast<long long>(f.sizes.hidden),
          static_cast<long long>(f.sizes.inner), number_text(f.sizes.vocab).c_str(),
          number_text(f.sizes.parameters()).c_str(),
          number_text(static_cast<std::int64_t>(f.logitless_loss.size())).c_str(), number_text(f.options.rows).c_str(),
          f.options.rate, f.options.head.c_str(), static_cast<long long>(f.options.seed)) +
      escaped(f.machine) + ".</p>\n<p>Look at the same head yourself:</p>\n<pre>";
  for (const std::string& command : f.commands) page += escaped(command) + "\n";
  return page + "</pre>\n</main></body></html>\n";
}

}  // namespace tiny_lm
