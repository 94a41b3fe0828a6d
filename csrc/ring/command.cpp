#include "ring/command.h"

#include <string>

#include "base/error.h"

namespace fanfold {
namespace {

const char* name_of(CommandField field) {
  switch (field) {
    case CommandField::kKind:
      return "kind";
    case CommandField::kPeer:
      return "peer";
    case CommandField::kCounter:
      return "counter";
    case CommandField::kBytes:
      return "bytes";
    case CommandField::kAmount:
      return "amount";
    case CommandField::kSource:
      return "source";
    case CommandField::kTarget:
      return "target";
    case CommandField::kWord:
      return "word";
    case CommandField::kFits:
      break;
  }
  return "command";
}

const char* name_of(CommandKind kind) {
  switch (kind) {
    case CommandKind::kNone:
      return "command that does nothing";
    case CommandKind::kWrite:
      return "write";
    case CommandKind::kSignal:
      return "signal";
    case CommandKind::kFence:
      return "fence";
    case CommandKind::kBarrier:
      return "barrier";
    case CommandKind::kStore:
      return "store";
  }
  return "command";
}

std::string bound_of(CommandKind kind, CommandField field) {
  const int64_t bound = command_bound(kind, field);
  if (field == CommandField::kKind) return "a CommandKind, 0 to " + std::to_string(bound);
  if (bound == 0) return std::string("0 in a ") + name_of(kind);
  const bool offset = field == CommandField::kSource || field == CommandField::kTarget;
  return (offset ? "a multiple of " + std::to_string(command_unit(kind)) + " from 0 to "
                 : "0 to ") +
         std::to_string(bound);
}

}  // namespace

Command make_command(const CommandFields& fields) {
  Command command{};
  const CommandField wrong = Command::make(fields, command);
  if (wrong == CommandField::kFits) return command;
  throw BadArgument(name_of(wrong), std::to_string(command_value(fields, wrong)),
                    bound_of(fields.kind, wrong));
}

}  // namespace fanfold
