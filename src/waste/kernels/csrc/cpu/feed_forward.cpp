// The two products of a SwiGLU with the activation between them. Each expert's weights are decoded once for all
// the tokens that chose it.
#include "feed_forward.hpp"

#include "linear.hpp"
#include "vector.hpp"

#include <algorithm>

namespace waste {

namespace {

// One feed-forward over vectors that may lie anywhere.
struct Task {
  const Mlp *w;
  const float **x;
  float **out;
  std::size_t tokens;
};

// scratch: two inner widths for each vector of the tasks.
void run(Stage &stage, const Task *tasks, std::size_t count, float limit, float *scratch) {
  Product *products = stage.array<Product>(2 * count);
  std::size_t vectors = 0;
  for (std::size_t i = 0; i < count; ++i) {
    vectors += tasks[i].tokens;
  }
  const std::size_t inner = tasks[0].w->gate.rows;
  float **gates = rows_of(stage, scratch, inner, vectors);
  float **ups = rows_of(stage, scratch + vectors * inner, inner, vectors);
  for (std::size_t i = 0, at = 0; i < count; at += tasks[i++].tokens) {
    products[2 * i] = product(tasks[i].w->gate, tasks[i].x, gates + at, tasks[i].tokens);
    products[2 * i + 1] = product(tasks[i].w->up, tasks[i].x, ups + at, tasks[i].tokens);
  }
  multiply(stage, {products, 2 * count});
  constexpr std::size_t span = 512; // activations per item
  const std::size_t spans = ceil_div(inner, span);
  stage.parallel(vectors * spans, vectors * inner * 8, [&](std::size_t item, std::size_t) {
    const std::size_t i = item / spans, begin = item % spans * span, size = std::min(span, inner - begin);
    swiglu(gates[i] + begin, ups[i] + begin, size, limit);
  });
  for (std::size_t i = 0, at = 0; i < count; at += tasks[i++].tokens) {
    products[i] = product(tasks[i].w->down, gates + at, tasks[i].out, tasks[i].tokens);
  }
  multiply(stage, {products, count});
}

} // namespace

void mlp(Pool &pool, const float *x, const Mlp &w, float limit, float *out, std::size_t tokens) {
  Stage stage(pool);
  // Scratch memory is bounded by the run, not by the prompt: 6 MB at an inner width of 12288.
  float *scratch = stage.floats(2 * w.gate.rows * std::min(tokens, TOKENS));
  for (std::size_t t = 0; t < tokens; t += TOKENS) {
    const std::size_t n = std::min(TOKENS, tokens - t);
    const Task task{&w, rows_of(stage, x + t * w.gate.cols, w.gate.cols, n),
                    rows_of(stage, out + t * w.down.rows, w.down.rows, n), n};
    run(stage, &task, 1, limit, scratch);
  }
}

void experts(Pool &pool, const float *x, const std::int32_t *ids, const Expert *given, std::size_t count,
             float limit, float *out, std::size_t tokens, std::size_t top_k) {
  // Experts run together until they have this many vectors between them: enough to keep all threads busy, and a
  // bound on scratch memory (8.4 MB at an inner width of 2048) unless a single expert has more.
  constexpr std::size_t together = 512;
  if (count == 0) {
    return;
  }
  Stage stage(pool);
  const std::size_t inner = given[0].w.gate.rows, dim = given[0].w.down.rows;
  Task *tasks = stage.array<Task>(count);
  float *scratch = stage.floats(2 * inner * std::min(tokens * top_k, together + tokens));
  std::size_t waiting = 0, vectors = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t n = static_cast<std::size_t>(std::count(ids, ids + tokens * top_k, given[i].id));
    Task task{&given[i].w, stage.array<const float *>(n), stage.array<float *>(n), 0};
    for (std::size_t row = 0; row < tokens * top_k; ++row) {
      if (ids[row] == given[i].id) {
        task.x[task.tokens] = x + row / top_k * dim;
        task.out[task.tokens++] = out + row * dim;
      }
    }
    if (n > 0) {
      tasks[waiting++] = task;
      vectors += n;
    }
    if (vectors >= together || (i + 1 == count && waiting > 0)) {
      run(stage, tasks, waiting, limit, scratch);
      waiting = vectors = 0;
    }
  }
}

} // namespace waste
