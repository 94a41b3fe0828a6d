// A gateway's part of a combine: sums the rows that the ranks of this host return to one source on
// another host, in rank order, and streams the sums to it.
//
// The streams of this host's ranks are in the order of tokens, and so are the sums. The source
// knows how many tokens have an expert on this host, and expects a record for each. If this rank
// has masked another, some may be missing; then records of kMissingToken follow at the end.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/local_sums.h"
#include "host/reduce.h"
#include "host/stream.h"

namespace fanfold {

class Forward {
 public:
  // `own` are this rank's rows for the source.
  Forward(Exchange& exchange, const StreamLayout& layout, LocalSums& sums, OutgoingRows& own,
          int32_t source);

  // Sends sums up to the end of a chunk. Returns whether it has sent or read anything.
  bool run();
  bool ready();
  bool finished() const;
  std::optional<Pending> pending(int32_t peer) const;
  void acknowledge();

 private:
  bool present() const { return exchange_.present(source_); }
  void open();
  std::optional<int32_t> next_token();
  void sum(int32_t token, const Record& record);
  bool own_has(int32_t token) const;

  Exchange& exchange_;
  StreamLayout layout_;
  LocalSums& sums_;
  OutgoingRows& own_;
  int32_t source_;
  StreamWriter writer_;
  std::vector<StreamReader> readers_;  // of the other ranks of this host, ascending
  std::vector<ReduceTerm> terms_;
  std::vector<uint16_t> own_row_;
  int32_t piece_ = 0;
  bool opened_ = false;
};

}  // namespace fanfold
