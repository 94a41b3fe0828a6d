// What carries a rank's rows and words to ranks on other hosts. Kernels that are compiled with
// NCCL's headers have its GIN, all others proxies of the CPU.
//
//   words_command, rows_command   bytes of this rank's send area, to the same place at the peer
//   store_command                 a word, behind all that was pushed for the peer before
//   push_commands                 pushes those of some of a warp's lanes, in their order
//   is_lost_peer                  where it knows: whether it reaches a peer no more
//   take_arrivals                 where words do not arrive in their places: brings them there
//
// What a word says is there when the peer sees the word. Nothing else arrives in any order.
#pragma once

#include "constants.h"

#ifdef FANFOLD_FOREIGN
#include "protocol/gin_wire.cuh"
#else
#include "protocol/proxy_wire.cuh"
#endif
