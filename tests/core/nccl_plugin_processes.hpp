// Ranks of the NCCL plugin that are processes.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "nccl_plugin_world.hpp"
#include "processes.hpp"

namespace fanfold::nccl_plugin {

class Processes {
 public:
  using Body = std::function<void(Rank&, Pipes&)>;

  // Starts the processes, and exchanges their handles. `before` runs first in each of them.
  Processes(
      int ranks, const Body& body, const std::function<void(int)>& before = [](int) {})
      : pipes_(static_cast<size_t>(ranks)) {
    children_.reserve(pipes_.size());
    for (int number = 0; number < ranks; ++number) {
      children_.push_back(std::make_unique<Child>([&, number] {
        before(number);
        Pipes& pipe = pipes_[static_cast<size_t>(number)];
        Rank rank(Version::kRma14, number, ranks, 2);
        rank.open([&](std::vector<Handle>& handles) {
          require(pipe.put(1, handles[static_cast<size_t>(number)].data(), sizeof(Handle)) &&
                      pipe.get(1, handles.data(), handles.size() * sizeof(Handle)),
                  "the exchange of handles");
        });
        body(rank, pipe);
      }));
    }
    std::vector<Handle> handles(pipes_.size());
    for (size_t rank = 0; rank < pipes_.size(); ++rank) {
      CHECK(pipes_[rank].get(0, handles[rank].data(), sizeof(Handle)));
    }
    for (Pipes& pipe : pipes_) CHECK(pipe.put(0, handles.data(), handles.size() * sizeof(Handle)));
  }

  // Waits for the letter that each of these ranks writes to its pipe.
  void expect(const std::vector<size_t>& ranks, char letter) {
    for (const size_t rank : ranks) {
      char word = 0;
      CHECK(pipes_[rank].get(0, &word, 1));
      CHECK_EQ(word, letter);
    }
  }
  void kill(size_t rank) { children_[rank]->end(); }

 private:
  std::vector<Pipes> pipes_;
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace fanfold::nccl_plugin
