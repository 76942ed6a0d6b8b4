// The crew behind Pool: spin briefly for the next loop, then park; survive fork; pass exceptions on.
#include "pool.hpp"

#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif

namespace waste {

namespace {

// Subnormal operands cost a hundred cycles each and carry nothing: treat them as zero (FTZ and DAZ).
unsigned long long flush_denormals() {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
#elif defined(__aarch64__)
  unsigned long long before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | (1ull << 24)));
  return before;
#else
  return 0;
#endif
}

void restore_float_mode(unsigned long long mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
  static_cast<void>(mode);
#endif
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Loops of one stage follow each other within microseconds, so a waiting thread first spins (some 20 us); beyond
// that it would take a core from somebody who has work.
constexpr int SPINS = 500;

// Below this much work (some 5 us) a loop runs on the calling thread alone.
constexpr std::size_t WORTH_SHARING = 1 << 15;

template <class Ready, class T> void await(std::atomic<T> &value, const Ready &ready) {
  for (int i = 0; i < SPINS; ++i) {
    if (ready(value.load(std::memory_order_acquire))) {
      return;
    }
    relax();
  }
  for (T now = value.load(std::memory_order_acquire); !ready(now); now = value.load(std::memory_order_acquire)) {
    value.wait(now, std::memory_order_acquire);
  }
}

std::atomic<unsigned> forks{0}; // how many forks lie between the first process and this one

void count_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  });
#endif
}

struct AlignedDelete {
  void operator()(std::byte *block) const { ::operator delete[](block, std::align_val_t{64}); }
};

// Bump allocation out of memory that is kept between stages.
class Scratch {
public:
  void *allocate(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (blocks_.empty() || blocks_.back().used + bytes > blocks_.back().size) {
      add(bytes > SMALLEST ? bytes : SMALLEST);
    }
    Block &block = blocks_.back();
    void *place = block.memory.get() + block.used;
    block.used += bytes;
    return place;
  }

  // Forget everything; what took several blocks takes one the next time.
  void reset() {
    if (blocks_.size() > 1) {
      std::size_t total = 0;
      for (const Block &block : blocks_) {
        total += block.size;
      }
      blocks_.clear();
      add(total);
    }
    if (!blocks_.empty()) {
      blocks_.back().used = 0;
    }
  }

private:
  static constexpr std::size_t SMALLEST = 1 << 20;

  struct Block {
    std::unique_ptr<std::byte[], AlignedDelete> memory;
    std::size_t size;
    std::size_t used;
  };

  void add(std::size_t size) {
    blocks_.reserve(blocks_.size() + 1);
    auto *memory = static_cast<std::byte *>(::operator new[](size, std::align_val_t{64}));
    blocks_.push_back(Block{std::unique_ptr<std::byte[], AlignedDelete>(memory), size, 0});
  }

  std::vector<Block> blocks_;
};

} // namespace

struct Crew {
  explicit Crew(std::size_t size) : size(size), born(forks.load(std::memory_order_relaxed)) {}

  ~Crew() {
    stop = true;
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread &thread : threads) {
      thread.join();
    }
  }

  bool of_this_process() const { return born == forks.load(std::memory_order_relaxed); }

  // Threads start with all signals blocked: Python's handlers belong to its own threads.
  void start() {
    if (!threads.empty() || size == 1) {
      return;
    }
#if defined(__unix__) || defined(__APPLE__)
    sigset_t everything, before;
    sigfillset(&everything);
    pthread_sigmask(SIG_SETMASK, &everything, &before);
#endif
    try {
      threads.reserve(size - 1);
      const std::uint32_t now = generation.load(std::memory_order_relaxed);
      for (std::size_t worker = 1; worker < size; ++worker) {
        threads.emplace_back([this, worker, now] { serve(worker, now); });
      }
    } catch (const std::exception &) {
      // No more threads to be had: those that started do the work, the results are the same.
    }
#if defined(__unix__) || defined(__APPLE__)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
  }

  void serve(std::size_t worker, std::uint32_t seen) {
    flush_denormals();
    for (;;) {
      await(generation, [seen](std::uint32_t now) { return now != seen; });
      seen = generation.load(std::memory_order_acquire);
      if (stop) {
        return;
      }
      work(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        busy.notify_one();
      }
    }
  }

  void work(std::size_t worker) {
    try {
      for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < items;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        body(context, i, worker);
      }
    } catch (...) {
      const std::lock_guard lock(failing);
      failure = std::current_exception();
    }
  }

  const std::size_t size;
  const unsigned born;
  std::mutex turn; // held for a whole stage
  Scratch scratch; // of the stage
  Scratch passing; // of its current loop
  std::vector<std::thread> threads;
  bool stop = false;

  // The loop being run. Written while nobody works; published by `generation`.
  void (*body)(const void *, std::size_t, std::size_t) = nullptr;
  const void *context = nullptr;
  std::size_t items = 0;
  std::mutex failing;
  std::exception_ptr failure;

  alignas(64) std::atomic<std::uint32_t> generation{0};
  alignas(64) std::atomic<std::uint32_t> busy{0}; // threads still in the current loop
  alignas(64) std::atomic<std::size_t> next{0};
};

Pool::Pool(std::size_t threads) : threads_(threads) {
  count_forks();
  crew_ = new Crew(threads);
}

Pool::~Pool() {
  Crew *crew = crew_.load();
  if (crew->of_this_process()) {
    delete crew;
  }
  // Otherwise its threads exist in another process only: there is nothing to join, and a lock of it may have been
  // held when the process forked. It stays where it is.
}

Crew &Pool::crew() {
  Crew *crew = crew_.load(std::memory_order_acquire);
  while (!crew->of_this_process()) {
    auto fresh = std::make_unique<Crew>(threads_);
    if (crew_.compare_exchange_strong(crew, fresh.get(), std::memory_order_acq_rel)) {
      crew = fresh.release();
    }
  }
  return *crew;
}

Stage::Stage(Pool &pool) : crew_(pool.crew()), turn_(crew_.turn), float_mode_(flush_denormals()) {
  crew_.scratch.reset();
}

Stage::~Stage() { restore_float_mode(float_mode_); }

std::size_t Stage::threads() const { return crew_.size; }

void *Stage::allocate(std::size_t bytes) { return crew_.scratch.allocate(bytes); }

float *Stage::passing_floats(std::size_t count) {
  crew_.passing.reset();
  return static_cast<float *>(crew_.passing.allocate(count * sizeof(float)));
}

void Stage::run(std::size_t items, std::size_t work, const void *context, Body body) {
  if (crew_.size == 1 || items < 2 || work < WORTH_SHARING) {
    for (std::size_t i = 0; i < items; ++i) {
      body(context, i, 0);
    }
    return;
  }
  crew_.start();
  crew_.body = body;
  crew_.context = context;
  crew_.items = items;
  crew_.failure = nullptr;
  crew_.next.store(0, std::memory_order_relaxed);
  crew_.busy.store(static_cast<std::uint32_t>(crew_.threads.size()), std::memory_order_relaxed);
  crew_.generation.fetch_add(1, std::memory_order_release);
  crew_.generation.notify_all();
  crew_.work(0);
  await(crew_.busy, [](std::uint32_t left) { return left == 0; });
  if (crew_.failure) {
    std::rethrow_exception(crew_.failure);
  }
}

} // namespace waste
