// Checks and times variants of whole dispatch and combine kernels.
//   low_latency RESULTS.jsonl [what ...]    what: 0 1 2 (a geometry), lost; geometries if none
#include <chrono>

#include "session.cuh"

namespace fanfold::probe {

// ---- variants -----------------------------------------------------------------------------------

template <int Senders, int Warps>
struct Split : DispatchPolicy {
  static constexpr int kSenders = Senders;
  static constexpr int kWarps = Warps;
};
using Best = Split<20, 24>;

struct OneAtOnce : Best {
  static constexpr int kAtOnce = 1;
};
struct ThreeAtOnce : Best {
  static constexpr int kAtOnce = 3;
};
struct Bulk32 : DispatchPolicy {
  static constexpr Push kPush = Push::kBulk;
  static constexpr int kWarps = 32;
};
struct BulkRoles32 : Bulk32 {
  static constexpr Places kPlaces = Places::kHeaderWarps;
};
struct RowsInTurn : Best {
  static constexpr bool kAnyOrder = false;
};
struct OwnRankLast : Best {
  static constexpr OwnRank kOwnRank = OwnRank::kLast;
};
struct CountsOnDemand : Best {
  static constexpr bool kCountsAhead = false;
};
struct PeekEarly : Best {
  static constexpr bool kPeekEarly = true;
};
struct ScalesByRow : Best {
  static constexpr bool kScalesByColumn = false;
};
struct RowFlag : DispatchPolicy {
  static constexpr Arrival kArrival = Arrival::kRowFlag;
};
struct BulkRowFlag : Bulk32 {
  static constexpr Arrival kArrival = Arrival::kRowFlag;
};
struct SegmentFlag : Best {
  static constexpr Arrival kArrival = Arrival::kSegmentFlag;
};
struct NoFanOut : Best {
  static constexpr int kFanOuts = 0;
};
struct TwoFanOuts : Best {
  static constexpr int kFanOuts = 2;
};
struct NoQuantise : Best {
  static constexpr bool kQuantise = false;
};
struct NoRemoteRows : Best {
  static constexpr bool kRemoteRows = false;
};
struct Traced : Best {
  static constexpr bool kTrace = true;
};
struct UnsplitTraced : DispatchPolicy {
  static constexpr bool kTrace = true;
};

template <int Receivers, int Warps>
struct CombineSplit : CombinePolicy {
  static constexpr int kReceivers = Receivers;
  static constexpr int kWarps = Warps;
};
struct CombineSegmentFlag : CombinePolicy {
  static constexpr Arrival kArrival = Arrival::kSegmentFlag;
};
struct CombineBulk : CombinePolicy {
  static constexpr Push kPush = Push::kBulk;
};
struct CombineBulkRowFlag : CombineBulk {
  static constexpr Arrival kArrival = Arrival::kRowFlag;
};
struct TwoReads : CombinePolicy {
  static constexpr int kReadRepeats = 2;
};
struct NoReads : CombinePolicy {
  static constexpr bool kReadRows = false;
};
struct CombineNoRemote : CombinePolicy {
  static constexpr bool kRemoteRows = false;
};
struct CombineSplitTraced : CombinePolicy {
  static constexpr bool kTrace = true;
  static constexpr int kReceivers = 48;
};
struct CombineTraced : CombinePolicy {
  static constexpr bool kTrace = true;
};

// ---- one geometry -------------------------------------------------------------------------------

template <class G>
class Study {
 public:
  Study(Node& node, Report& report) : node_(node), report_(report), session_(node) {
    add_case({128, 128, 128, 128}, 0.0, false);
    add_case({128, 77, 0, 5}, 0.1, true);
    add_case({0, 5, 128, 1}, 0.1, true);
    add_case({8, 8, 8, 8}, 0.0, false);
  }

  // The last rank never calls: the others must report it and end, and work again after a reset.
  void lose_a_rank() {
    session_.reset();
    const auto start = std::chrono::steady_clock::now();
    node_.each([&](int r) {
      if (r + 1 < node_.ranks()) session_.template dispatch<Best>(r);
    });
    node_.synchronize();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    report_.line(fields("lost", "one rank never calls") + ", " + field("seconds", waited.count()) +
                 ", " + field("timeouts", node_.take_errors()));
    check_pair<Best, CombinePolicy>("after the loss");
  }

  void run() {
    dispatches();
    combines();
    both();
    traces<Traced, CombineTraced>("20 senders");
    traces<UnsplitTraced, CombineSplitTraced>("every CTA sends");
  }

 private:
  struct Case {
    Workload<G> work;
    std::vector<Expected<G>> expected;
  };
  using Call = std::function<void(int rank)>;

  void add_case(const std::vector<int>& tokens, double none, bool duplicates) {
    Workload<G> work(static_cast<uint32_t>(cases_.size()) + 7, tokens, none, duplicates);
    auto expected = expect(work, node_.ranks());
    session_.upload(work, static_cast<int>(cases_.size()));
    cases_.push_back({std::move(work), std::move(expected)});
  }

  std::string fields(const std::string& probe, const std::string& variant) {
    return field("probe", probe) + ", " + field("variant", variant) + ", " +
           field("hidden", G::kHidden) + ", " + field("topk", G::kTopK) + ", " +
           field("experts", G::kExperts) + ", " + field("gpus", node_.ranks());
  }

  // Calls on changing input without a host in between, then a look at the last one's output; each
  // case is the last of two runs, on either half of the buffers.
  template <class D, class C>
  void check_pair(const std::string& name) {
    session_.reset();
    int mistakes = 0;
    for (int calls = 60; calls < 60 + 2 * kInputs; ++calls) {
      session_.poison_outputs();
      const int last = calls / 2 % kInputs;
      node_.together([&](int r) {
        for (int i = calls; i >= 0; --i) {
          session_.select(r, (last + i * 3) % kInputs);
          session_.template dispatch<D>(r);
          session_.template combine<C>(r);
        }
      });
      node_.synchronize();
      mistakes += session_.dispatch_mistakes(cases_[last].expected, D::kScalesByColumn);
      mistakes += session_.combine_mistakes(cases_[last].expected);
    }
    const bool late = node_.take_errors();
    report_.line(fields("check", name) + ", " + field("mistakes", mistakes) + ", " +
                 field("timeouts", late));
  }

  void time_call(const std::string& probe, const std::string& name, const Call& call) {
    for (int which : {0, 3}) {
      session_.reset();
      node_.each([&](int r) {
        session_.select(r, which);
        session_.template dispatch<DispatchPolicy>(r);
      });
      node_.synchronize();
      const std::string all =
          fields(probe, name) + ", " + field("tokens", cases_[which].work.tokens[0]);
      report_.timing(all + ", " + field("mode", "chain"), time_plan(node_, {call, 20, 40, false}));
      report_.timing(all + ", " + field("mode", "single"), time_plan(node_, {call, 1, 60, false}));
      report_.timing(all + ", " + field("mode", "cold"), time_plan(node_, {call, 1, 60, true}));
      if (node_.take_errors()) report_.line(all + ", " + field("timeouts", 1));
    }
  }

  // The two halves by themselves: sending until the kernel ends, and receiving what is all there.
  void time_halves(const std::string& probe, const std::string& name, const Call& send,
                   const Call& receive) {
    for (int which : {0, 3}) {
      session_.reset();
      node_.each([&](int r) {
        session_.select(r, which);
        session_.template dispatch<DispatchPolicy>(r);
      });
      node_.synchronize();
      const std::string all =
          fields(probe, name) + ", " + field("tokens", cases_[which].work.tokens[0]);
      Plan plan{send, 1, 60, false};
      plan.after = receive;
      report_.timing(all + ", " + field("mode", "send half"), time_plan(node_, plan));
      plan.enqueue = receive;
      plan.before = send;
      plan.after = [](int) {};
      report_.timing(all + ", " + field("mode", "receive half"), time_plan(node_, plan));
    }
  }

  template <class D>
  void dispatch_halves(const std::string& name) {
    time_halves(
        "dispatch", name, [this](int r) { session_.template dispatch<D>(r, kSend); },
        [this](int r) { session_.template dispatch<D>(r, kReceive); });
  }

  template <class D>
  void time_dispatch(const std::string& name, uint32_t phases = kWhole, bool early = false) {
    time_call("dispatch", name, [=, this](int r) {
      if (phases == kWhole) return session_.template dispatch<D>(r, kWhole, early);
      session_.template dispatch<D>(r, kSend, early);
      session_.template dispatch<D>(r, kReceive, early);
    });
  }

  template <class C>
  void time_combine(const std::string& name, uint32_t phases = kWhole, bool early = false) {
    time_call("combine", name, [=, this](int r) {
      if (phases == kWhole) return session_.template combine<C>(r, kWhole, early);
      session_.template combine<C>(r, kSend, early);
      session_.template combine<C>(r, kReceive, early);
    });
  }

  template <class D>
  void full_dispatch(const std::string& name) {
    check_pair<D, CombinePolicy>(name);
    time_dispatch<D>(name);
  }

  template <class C>
  void full_combine(const std::string& name) {
    check_pair<DispatchPolicy, C>(name);
    time_combine<C>(name);
  }

  void dispatches() {
    full_dispatch<DispatchPolicy>("every CTA sends");
    full_dispatch<Bulk32>("every CTA sends, bulk, 32 warps");
    full_dispatch<BulkRoles32>("every CTA sends, bulk, 32 warps in roles");
    full_dispatch<RowFlag>("every CTA sends, row flag");
    full_dispatch<BulkRowFlag>("every CTA sends, bulk, row flag");
    full_dispatch<Split<8, 24>>("8 senders");
    full_dispatch<Split<12, 24>>("12 senders");
    full_dispatch<Split<16, 24>>("16 senders");
    full_dispatch<Best>("20 senders");
    full_dispatch<Split<24, 24>>("24 senders");
    full_dispatch<Split<32, 24>>("32 senders");
    full_dispatch<Split<64, 24>>("64 senders");
    full_dispatch<Split<16, 16>>("16 senders, 16 warps");
    full_dispatch<Split<20, 16>>("20 senders, 16 warps");
    full_dispatch<Split<24, 16>>("24 senders, 16 warps");
    full_dispatch<OneAtOnce>("20 senders, 1 at once");
    full_dispatch<ThreeAtOnce>("20 senders, 3 at once");
    dispatch_halves<Best>("20 senders");
    dispatch_halves<DispatchPolicy>("every CTA sends");
    time_dispatch<Best>("20 senders, early launch", kWhole, true);
    time_dispatch<Best>("20 senders, two kernels", 0);
    full_dispatch<RowsInTurn>("20 senders, rows in turn");
    full_dispatch<OwnRankLast>("20 senders, own rank last");
    full_dispatch<CountsOnDemand>("20 senders, counts on demand");
    full_dispatch<PeekEarly>("20 senders, peek early");
    full_dispatch<ScalesByRow>("20 senders, scales by row");
    full_dispatch<SegmentFlag>("20 senders, segment flag");
    time_dispatch<NoFanOut>("20 senders, without fan-out");
    time_dispatch<TwoFanOuts>("20 senders, fan-out twice");
    time_dispatch<NoQuantise>("20 senders, without quantising");
    time_dispatch<NoRemoteRows>("20 senders, without remote rows");
  }

  void combines() {
    full_combine<CombinePolicy>("every CTA does both");
    time_combine<CombinePolicy>("every CTA does both, early launch", kWhole, true);
    time_combine<CombinePolicy>("every CTA does both, two kernels", 0);
    time_halves(
        "combine", "every CTA does both",
        [this](int r) { session_.template combine<CombinePolicy>(r, kSend); },
        [this](int r) { session_.template combine<CombinePolicy>(r, kReceive); });
    full_combine<CombineSplit<16, 32>>("16 receivers");
    full_combine<CombineSplit<32, 32>>("32 receivers");
    full_combine<CombineSplit<48, 32>>("48 receivers");
    full_combine<CombineSplit<64, 32>>("64 receivers");
    full_combine<CombineSplit<100, 32>>("100 receivers");
    full_combine<CombineSplit<0, 16>>("every CTA does both, 16 warps");
    full_combine<CombineBulk>("every CTA does both, bulk");
    full_combine<CombineSegmentFlag>("every CTA does both, segment flag");
    full_combine<CombineBulkRowFlag>("every CTA does both, bulk, row flag");
    time_combine<TwoReads>("every CTA does both, reads twice");
    time_combine<NoReads>("every CTA does both, without reads");
    time_combine<CombineNoRemote>("every CTA does both, without remote rows");
  }

  void both() {
    time_both<Best, CombinePolicy>("20 senders");
    time_both<DispatchPolicy, CombinePolicy>("every CTA sends");
  }

  template <class D, class C>
  void time_both(const std::string& name) {
    for (bool early : {false, true})
      time_call("both", name + (early ? ", early launch" : ""), [=, this](int r) {
        session_.template dispatch<D>(r, kWhole, early);
        session_.template combine<C>(r, kWhole, early);
      });
  }

  // Where a call's time goes, from the first CTA's start, in nanoseconds.
  template <class D, class C>
  void traces(const std::string& name) {
    for (int which : {0, 3}) {
      session_.reset();
      for (int r = 0; r < node_.ranks(); ++r) session_.select(r, which);
      for (int i = 0; i < 8; ++i)
        trace_once("dispatch " + name, which, i, [&](int r) { session_.template dispatch<D>(r); });
      for (int i = 0; i < 8; ++i)
        trace_once("combine with dispatch " + name, which, i,
                   [&](int r) { session_.template combine<C>(r); });
    }
  }

  void trace_once(const std::string& probe, int which, int round, const Call& call) {
    node_.each([&](int r) {
      node_.enqueue_barrier(r);
      call(r);
    });
    node_.synchronize();
    if (round < 4) return;
    node_.each([&](int r) {
      const auto stamps = download(session_.memory(r).trace, kCtas);
      uint64_t first = stamps[0].start;
      for (const Trace& s : stamps) first = std::min(first, s.start);
      std::string line = fields("trace", probe) + ", " +
                         field("tokens", cases_[which].work.tokens[0]) + ", " + field("rank", r);
      line += moment("start", stamps, &Trace::start, first);
      line += moment("sent", stamps, &Trace::sent, first);
      line += moment("resolved", stamps, &Trace::resolved, first);
      line += moment("end", stamps, &Trace::end, first);
      line += tasks("arrived", stamps, &TaskTrace::arrived, first);
      line += tasks("done", stamps, &TaskTrace::done, first);
      report_.line(line);
    });
  }

  static std::string moment(const char* name, const std::vector<Trace>& stamps,
                            uint64_t Trace::* member, uint64_t first) {
    std::vector<double> at;
    for (const Trace& s : stamps)
      if (s.*member >= first) at.push_back(static_cast<double>(s.*member - first));
    std::sort(at.begin(), at.end());
    return ", " + field((std::string(name) + "_median").c_str(), at[at.size() / 2]) + ", " +
           field((std::string(name) + "_last").c_str(), at.back());
  }

  // Deciles of a moment of all segments.
  static std::string tasks(const char* name, const std::vector<Trace>& stamps,
                           uint64_t TaskTrace::* member, uint64_t first) {
    std::vector<uint64_t> at;
    for (const Trace& s : stamps)
      for (const TaskTrace& t : s.tasks)
        if (t.*member >= first) at.push_back(t.*member - first);
    if (at.empty()) return "";
    std::sort(at.begin(), at.end());
    std::string deciles;
    for (int i = 0; i <= 10; ++i)
      deciles += (i ? ", " : "") + std::to_string(at[(at.size() - 1) * i / 10]);
    return ", \"" + std::string(name) + "\": [" + deciles + "]";
  }

  Node& node_;
  Report& report_;
  Session<G> session_;
  std::vector<Case> cases_;
};

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl [geometry ...]\n", argv[0]), 2;
  Node node;
  Report report(argv[1]);
  const auto chosen = [&](const char* name) {
    bool any = argc == 2;
    for (int i = 2; i < argc; ++i) any |= std::string(argv[i]) == name;
    return any;
  };
  if (argc > 2 && std::string(argv[2]) == "lost")
    return Study<Geometry<7168, 8, 256>>(node, report).lose_a_rank(), 0;
  if (chosen("0")) Study<Geometry<7168, 8, 256>>(node, report).run();
  if (chosen("1")) Study<Geometry<2048, 8, 512>>(node, report).run();
  if (chosen("2")) Study<Geometry<1024, 22, 512>>(node, report).run();
}
