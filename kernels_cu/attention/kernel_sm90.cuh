// The warp-specialised role split of Hopper attention, persistent over the query tiles of a
// scheduler: one thread of the producer warpgroup issues TMA loads; consumer warpgroups have 64
// queries each.
#pragma once
#include "attention/mainloop_sm90.cuh"
#include "attention/producer_sm90.cuh"

namespace attention {

// cu_seqlens_k: with paged keys the sequences' lengths.
template <class Arrays, class Kv> struct ArgumentsSm90 {
    const TensorMap &q_map, &k_map, &v_map, &out_map;
    RowArrays statistics;
    Arrays mask;
    const int32_t *cu_seqlens_q, *cu_seqlens_k, *schedule;
    uint32_t* counter;
    Kv kv;
};

template <class Traits> struct KernelSm90 {
    using Params = typename Traits::Params;
    using Arguments = ArgumentsSm90<typename Traits::Arrays, typename Traits::Kv>;
    using Storage = SharedStorage<Traits>;
    using Scheduler = TileScheduler<Traits>;
    static constexpr int kConsumers = Traits::kConsumers, kThreads = Traits::kThreads;
    // Registers per thread; their sum over the warpgroups is at most 65536 / 128 = 512.
    static constexpr bool kManyInProducer =
        Traits::kDivergent || (Traits::kGeneral && Traits::kDynamic);
    static constexpr int kProducerRegisters = kManyInProducer ? 56 : kConsumers == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kManyInProducer ? 224 : kConsumers == 2 ? 232 : 160;

    const Params& params;
    const Arguments& arguments;
    Storage& storage;

    DEVICE void run() {
        const Arguments& a = arguments;
        if (threadIdx.x == 0) {
            prefetch_tensor_map(a.q_map);
            prefetch_tensor_map(a.k_map);
            prefetch_tensor_map(a.v_map);
            prefetch_tensor_map(a.out_map);
            storage.init();
        }
        wait_for_previous_grid();
        if constexpr (Traits::kVarlen) {
            using Order = SequenceOrder<Traits::kVarlen>;
            // Scratch: the memory of the first query stage.
            auto* scratch = reinterpret_cast<typename Order::Length*>(storage.queries[0].bytes);
            storage.sequences.template make<Traits>(params, a.cu_seqlens_q, a.cu_seqlens_k,
                                                    scratch);
            fence_async_proxy();  // TMA loads queries to the scratch
        }
        sync_block();
        if (threadIdx.x / 128 == kConsumers) {
            decrease_registers<kProducerRegisters>();
            if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
                ProducerSm90<Traits>{storage, a.q_map, a.k_map, a.v_map, params, a.mask, a.kv}.run(
                    Scheduler::of(params, storage.sequences, a.schedule, a.counter, a.cu_seqlens_q,
                                  a.cu_seqlens_k));
            }
            sync_warp();
        } else {
            increase_registers<kConsumerRegisters>();
            MainloopSm90<Traits> mainloop(storage, a.out_map, params, a.mask, a.statistics);
            if constexpr (Traits::kDivergent) mainloop.run_divergent();
            else mainloop.run_uniform();
            if (threadIdx.x % 32 == 0) tma_store_wait<0>();
            sync_warp();
        }
    }
};

}  // namespace attention
