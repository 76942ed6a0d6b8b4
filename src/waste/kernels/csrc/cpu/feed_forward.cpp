// The two products of a SwiGLU with the activation between them. Each expert's weights are decoded once for all
// the tokens that chose it.
#include "feed_forward.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "vector.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace waste {

namespace {

// Vectors of a dense MLP that run together: bounds scratch memory by the run, not by the prompt (12 MB at an inner
// width of 12288), and decodes every weight once for as many as one product takes.
constexpr std::size_t RUN = 128;

// Experts run together until they have this many vectors between them: enough to keep all threads busy, and a bound
// on scratch memory (8.4 MB at an inner width of 2048) unless a single expert has more.
constexpr std::size_t TOGETHER = 512;

// One feed-forward over vectors that may lie anywhere.
struct Task {
  const Mlp *w;
  const float **x;
  float **out;
  std::size_t tokens;

  std::size_t inner() const { return w->gate.rows; }
};

std::size_t scratch_size(const Task *tasks, std::size_t count) {
  std::size_t numbers = 0;
  for (std::size_t i = 0; i < count; ++i) {
    numbers += 2 * tasks[i].tokens * tasks[i].inner();
  }
  return numbers;
}

// scratch: scratch_size(tasks, count) floats.
void run(Stage &stage, const Task *tasks, std::size_t count, float limit, float *scratch) {
  Product *products = stage.array<Product>(2 * count);
  struct Row {
    float *gate, *up;
    std::size_t size;
  };
  std::size_t vectors = 0, widest = 0, given = 0, apart = 0; // `apart`: vectors whose activation is a step of its own
  for (std::size_t i = 0; i < count; ++i) {
    vectors += tasks[i].tokens;
  }
  Row *rows = stage.array<Row>(vectors);
  float ***inner = stage.array<float **>(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Task &task = tasks[i];
    const std::size_t numbers = task.tokens * task.inner();
    inner[i] = rows_of(stage, scratch, task.inner(), task.tokens);
    if (can_gate(task.w->gate, task.w->up)) {
      products[given] = product(task.w->up, task.x, inner[i], task.tokens);
      products[given].gate = &task.w->gate;
      products[given++].limit = limit;
    } else {
      float **ups = rows_of(stage, scratch + numbers, task.inner(), task.tokens);
      products[given++] = product(task.w->gate, task.x, inner[i], task.tokens);
      products[given++] = product(task.w->up, task.x, ups, task.tokens);
      for (std::size_t t = 0; t < task.tokens; ++t) {
        rows[apart++] = {inner[i][t], ups[t], task.inner()};
      }
      widest = std::max(widest, task.inner());
    }
    scratch += 2 * numbers;
  }
  multiply(stage, {products, given});
  constexpr std::size_t span = 512; // activations per item
  const std::size_t spans = ceil_div(widest, span);
  stage.parallel(apart * spans, apart * widest * 8, [&](std::size_t item, std::size_t) {
    const Row &row = rows[item / spans];
    const std::size_t begin = item % spans * span;
    if (begin < row.size) {
      swiglu(row.gate + begin, row.up + begin, std::min(span, row.size - begin), limit);
    }
  });
  for (std::size_t i = 0; i < count; ++i) {
    products[i] = product(tasks[i].w->down, inner[i], tasks[i].out, tasks[i].tokens);
  }
  multiply(stage, {products, count});
}

// The tokens of each expert, from one pass over the choices. Experts that nobody chose have none.
Task *tasks_of(Stage &stage, const float *x, const Choices &choices, const Experts &experts, float *out) {
  const std::size_t rows = choices.tokens * choices.top_k, dim = experts.hidden;
  std::int32_t most = 0;
  for (std::size_t i = 0; i < experts.count; ++i) {
    most = std::max(most, experts.given[i].id);
  }
  std::int32_t *index = stage.array<std::int32_t>(static_cast<std::size_t>(most) + 1);
  std::fill(index, index + most + 1, -1);
  Task *tasks = stage.array<Task>(experts.count);
  for (std::size_t i = 0; i < experts.count; ++i) {
    index[experts.given[i].id] = static_cast<std::int32_t>(i);
    tasks[i] = {&experts.given[i].w, nullptr, nullptr, 0};
  }
  const auto task_of = [&](std::size_t row) -> Task * {
    const std::int32_t id = choices.ids[row];
    return id < 0 || id > most || index[id] < 0 ? nullptr : tasks + index[id];
  };
  for (std::size_t row = 0; row < rows; ++row) {
    if (Task *task = task_of(row)) {
      ++task->tokens;
    }
  }
  const float **xs = stage.array<const float *>(rows);
  float **outs = stage.array<float *>(rows);
  for (std::size_t i = 0, at = 0; i < experts.count; at += tasks[i++].tokens) {
    tasks[i].x = xs + at;
    tasks[i].out = outs + at;
  }
  std::size_t *filled = stage.array<std::size_t>(experts.count);
  std::fill(filled, filled + experts.count, 0);
  for (std::size_t row = 0; row < rows; ++row) {
    if (Task *task = task_of(row)) {
      const std::size_t at = filled[task - tasks]++;
      task->x[at] = x + row / choices.top_k * dim;
      task->out[at] = out + row * dim;
    }
  }
  return tasks;
}

// Takes turns between looking and letting others run: a read takes milliseconds, its end should cost microseconds.
class Patience {
public:
  // Until somebody should look again; false when the wait was interrupted.
  bool wait(bool (*interrupted)()) {
    if (looks_++ == 0) {
      began_ = Clock::now();
    }
    if (looks_ < 1000) {
      std::this_thread::yield();
      return true;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    // Some 20 times a second: a drive that hangs must not take Ctrl-C with it.
    return looks_ % 512 != 0 || interrupted == nullptr || !interrupted();
  }

  // Something has come.
  void rest() {
    if (looks_ > 0) {
      waited_ += Clock::now() - began_;
      looks_ = 0;
    }
  }

  double seconds() const { return waited_.count(); }

private:
  using Clock = std::chrono::steady_clock;
  int looks_ = 0;
  Clock::time_point began_;
  std::chrono::duration<double> waited_{};
};

// Runs every expert once, those that are there first. `first` is a task that waits for nobody, or null. Throws if `all`
// that were chosen must be given and are not.
Outcome run_experts(Stage &stage, const float *x, const Choices &choices, const Experts &experts, bool all,
                 const Task *first, float limit, float *out) {
  Task *tasks = experts.count > 0 ? tasks_of(stage, x, choices, experts, out) : nullptr;
  Task *ready = stage.array<Task>(experts.count + 1);
  bool *done = stage.array<bool>(experts.count);
  std::fill(done, done + experts.count, false);
  std::size_t largest = TOGETHER, inner = 0, rows = 0;
  for (std::size_t i = 0; i < experts.count; ++i) {
    largest = std::max(largest, tasks[i].tokens);
    inner = std::max(inner, tasks[i].inner());
    rows += tasks[i].tokens;
  }
  if (all && rows < choices.tokens * choices.top_k) {
    throw std::invalid_argument("a token chose an expert that is not among the records given");
  }
  const std::size_t vectors = std::min(choices.tokens * choices.top_k, TOGETHER + largest);
  float *scratch = stage.floats(2 * vectors * inner + (first != nullptr ? scratch_size(first, 1) : 0));
  std::size_t left = experts.count;
  Patience patience;
  while (left > 0 || first != nullptr) {
    std::size_t count = 0, together = 0;
    if (first != nullptr) {
      ready[count++] = *first;
      first = nullptr;
    }
    for (std::size_t i = 0; i < experts.count && together < TOGETHER; ++i) {
      if (done[i]) {
        continue;
      }
      if (const std::int32_t *flag = experts.given[i].arrived) {
        const std::int32_t state =
            std::atomic_ref(const_cast<std::int32_t &>(*flag)).load(std::memory_order_acquire);
        if (state < 0) {
          patience.rest();
          return {false, patience.seconds()};
        }
        if (state == 0) {
          continue;
        }
      }
      done[i] = true;
      --left;
      if (tasks[i].tokens > 0) {
        ready[count++] = tasks[i];
        together += tasks[i].tokens;
      }
    }
    if (count > 0) {
      patience.rest();
      run(stage, ready, count, limit, scratch);
    } else if (left > 0 && !patience.wait(experts.interrupted)) {
      patience.rest();
      return {false, patience.seconds()};
    }
  }
  patience.rest();
  return {true, patience.seconds()};
}

void weighted_sum(Stage &stage, const float *parts, const Choices &choices, const float *shared, float *out,
                  std::size_t dim) {
  constexpr std::size_t span = 1024; // columns per item
  const StreamLanes &sums = lanes().streams;
  const std::size_t spans = ceil_div(dim, span), k = choices.top_k;
  stage.parallel(choices.tokens * spans, choices.tokens * k * dim, [&](std::size_t item, std::size_t) {
    const std::size_t t = item / spans, begin = item % spans * span, at = t * dim + begin;
    sums.weighted(parts + t * k * dim + begin, dim, choices.weights + t * k, k,
                  shared != nullptr ? shared + at : nullptr, std::min(span, dim - begin), out + at);
  });
}

void run_mlp(Stage &stage, const float *x, const Mlp &w, float limit, float *out, std::size_t tokens) {
  float *scratch = stage.floats(2 * w.gate.rows * std::min(tokens, RUN));
  for (std::size_t t = 0; t < tokens; t += RUN) {
    const std::size_t n = std::min(RUN, tokens - t);
    const Task task{&w, rows_of(stage, x + t * w.gate.cols, w.gate.cols, n),
                    rows_of(stage, out + t * w.down.rows, w.down.rows, n), n};
    run(stage, &task, 1, limit, scratch);
  }
}

} // namespace

void mlp(Pool &pool, const float *x, const Mlp &w, float limit, float *out, std::size_t tokens) {
  Stage stage(pool);
  run_mlp(stage, x, w, limit, out, tokens);
}

Outcome experts(Pool &pool, const float *x, const Choices &choices, const Experts &given, float limit, float *out) {
  Stage stage(pool);
  return run_experts(stage, x, choices, given, false, nullptr, limit, out);
}

Outcome expert_group(Pool &pool, const float *x, const Choices &choices, const Experts &given, const Mlp *shared,
                  float limit, float *out) {
  Stage stage(pool);
  const std::size_t t = choices.tokens, dim = given.hidden;
  float *parts = stage.floats(t * choices.top_k * dim), *common = nullptr;
  Task first{};
  if (shared != nullptr) {
    common = stage.floats(t * dim);
    first = {shared, rows_of(stage, x, dim, t), rows_of(stage, common, dim, t), t};
    if (t > RUN) { // many tokens: in runs, and not beside the experts
      run_mlp(stage, x, *shared, limit, common, t);
    }
  }
  const Task *beside = shared != nullptr && t <= RUN ? &first : nullptr;
  const Outcome outcome = run_experts(stage, x, choices, given, true, beside, limit, parts);
  if (outcome.whole) {
    weighted_sum(stage, parts, choices, common, out, dim);
  }
  return outcome;
}

void combine(Pool &pool, const float *parts, const Choices &choices, const float *shared, float *out,
             std::size_t dim) {
  Stage stage(pool);
  weighted_sum(stage, parts, choices, shared, out, dim);
}

} // namespace waste
