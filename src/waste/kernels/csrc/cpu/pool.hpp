// Threads and scratch memory of the native stages: one persistent crew per Pool, one stage at a time.
//
// A stage is one native call. It takes the crew, turns denormals off, runs a few parallel loops with a barrier
// after each, and gives the crew back. Work is split by output, never by summand, so the number of threads and
// the order in which they claim items change no bit of a result.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <type_traits>

namespace waste {

struct Crew; // threads of this process and their scratch memory

class Pool {
public:
  // threads: at least 1, the caller's included. No thread starts before the first parallel loop.
  explicit Pool(std::size_t threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  std::size_t threads() const { return threads_; }

private:
  friend class Stage;
  Crew &crew();

  std::size_t threads_;
  std::atomic<Crew *> crew_;
};

class Stage {
public:
  explicit Stage(Pool &pool);
  ~Stage();
  Stage(const Stage &) = delete;
  Stage &operator=(const Stage &) = delete;

  std::size_t threads() const;

  // body(item, worker) for every item < items, in no particular order; worker < threads(). `work` is the size
  // of the whole loop in multiply-adds or the like: small loops are not worth waking anybody for.
  template <class Body> void parallel(std::size_t items, std::size_t work, const Body &body) {
    run(items, work, &body, [](const void *context, std::size_t item, std::size_t worker) {
      (*static_cast<const Body *>(context))(item, worker);
    });
  }

  // Uninitialised memory, 64-byte aligned, valid until the stage ends. Not for use inside parallel loops.
  template <class T> T *array(std::size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    return static_cast<T *>(allocate(count * sizeof(T)));
  }
  float *floats(std::size_t count) { return array<float>(count); }

  // Valid until the next call only: what one loop reads need not add up over all loops of a stage.
  float *passing_floats(std::size_t count);

private:
  using Body = void (*)(const void *, std::size_t, std::size_t);
  void run(std::size_t items, std::size_t work, const void *context, Body body);
  void *allocate(std::size_t bytes);

  Crew &crew_;
  std::unique_lock<std::mutex> turn_;
  unsigned long long float_mode_; // the caller's, restored at the end
};

} // namespace waste
