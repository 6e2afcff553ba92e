// The warp-specialised role split of every GEMM on Hopper: one producer warpgroup issues TMA loads,
// the consumer warpgroups run the mainloop and the epilogue, persistently over the tiles of a
// scheduler.
//
// An Epilogue has Params (scalars, by value), Arguments (tensor maps and arrays), Loader, Staging
// and SharedStorage, and
//   load       loads the broadcasts of one tile; called by the producer warpgroup's second warp if
//              loads()
//   Consumer   state of a consumer warpgroup: begin before a tile's mainloop, reduce and store
//              after it, finish after the last tile
//   kBackToBack
//              Consumer::run_back_to_back runs the block's tiles, unless it returns false
//   kClears    clear accumulators before the mainloop, where ptxas would otherwise serialise wgmma
//              (C7517)
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/reduce.cuh"
#include "gemm/scheduler.cuh"
#include "common/prefetch.cuh"

namespace gemm {

template <class Mainloop_, class Epilogue_, class Scheduler_> struct KernelSm90 {
    using Mainloop = Mainloop_;
    using Epilogue = Epilogue_;
    using Scheduler = Scheduler_;
    using Params = typename Epilogue::Params;
    using Arguments = typename Epilogue::Arguments;
    using OutputTile = typename Scheduler::Tile;
    using Loader = typename Epilogue::Loader;
    using Accumulator = typename Mainloop::Accumulator;
    static constexpr int kConsumers = Mainloop::kConsumers;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr bool kPingPong = Mainloop::kPingPong, kSplitK = Mainloop::kSplitK;
    static constexpr int kProducts = Mainloop::Operands::B::kCount;
    // Registers per thread: at launch, and after setmaxnreg of producer and consumers.  With one
    // consumer warpgroup, threads have the maximum at launch.
    static constexpr bool kReallocates = kConsumers > 1;
    static constexpr int kThreadRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kConsumers > 2           ? 32
                                              : Mainloop::kLoadsScales ? (kProducts > 1 ? 56 : 72)
                                                                       : 40;
    static constexpr int kConsumerRegisters =
        ((kConsumers + 1) * kThreadRegisters - kProducerRegisters) / kConsumers;

    struct SharedStorage {
        alignas(1024) typename Epilogue::Staging staging;
        alignas(1024) typename Mainloop::SharedStorage mainloop;
        typename Epilogue::SharedStorage epilogue;
    };

    const Params& params;
    const Arguments& arguments;
    SharedStorage& storage;

    DEVICE void run() {
        // The shuffle tells the compiler that warp and warpgroup are uniform.
        const int warp = shuffle(int(threadIdx.x / 32), 0), warpgroup = warp / 4;
        if (warp == 0 && elect_one()) {
            storage.epilogue.init();
            storage.mainloop.init();
        }
        const Scheduler scheduler(params);
        const int tile_offset = kPingPong && warpgroup < kConsumers ? warpgroup : 0;
        // Computed before the barrier, to overlap the initialisation of the pipeline.
        const OutputTile first_tile =
            scheduler.tile(params, scheduler.first + tile_offset * scheduler.step);
        const Loader loader{arguments};
        if (prefetches_maps(params, warp, 4 * kConsumers)) loader.prefetch_maps(first_tile);
        if constexpr (Mainloop::kMulticast) {
            if constexpr (Loader::kPrefetches) {
                if (warp == 4 * kConsumers && elect_one()) loader.prefetch(first_tile);
                sync_warp();
            }
            sync_cluster_barriers();
        } else {
            sync_block();
        }
        wait_for_previous_grid();
        if constexpr (kSplitK) Epilogue::Reduction::begin();
        const Epilogue epilogue(params, arguments);
        if (warpgroup == kConsumers) produce(scheduler, loader, epilogue, first_tile);
        else consume(scheduler, epilogue, first_tile, warp, warpgroup, tile_offset);
    }

    DEVICE void produce(const Scheduler& scheduler, const Loader& loader, const Epilogue& epilogue,
                        OutputTile first_tile) {
        if constexpr (kReallocates) decrease_registers<kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp == 4 * kConsumers && elect_one()) {
            typename Mainloop::PipelineState state;
            for (int i = scheduler.first; i < scheduler.end; i += scheduler.step) {
                const OutputTile tile =
                    i == scheduler.first ? first_tile : scheduler.tile(params, i);
                loader.load(scheduler, storage.mainloop, state, tile);
            }
            if (Mainloop::kMulticast) storage.mainloop.pipeline.producer_tail(state);
        }
        if (epilogue.loads() && warp == 4 * kConsumers + 1) {
            int count = 0;
            for (int i = scheduler.first; i < scheduler.end; i += scheduler.step, ++count)
                epilogue.load(storage.epilogue, scheduler.tile(params, i), count);
        }
        if constexpr (Mainloop::kLoadsScales) {
            if (const int index = warp - (4 * kConsumers + 2); index >= 0) {
                typename Mainloop::ScaleLoader scales{storage.mainloop, index, {}};
                for (int i = scheduler.first; i < scheduler.end; i += scheduler.step) {
                    scales.load(
                        arguments.block_scales(scheduler.tile(params, i), scheduler.first_k_tile),
                        scheduler.num_k_tiles);
                }
            }
        }
        sync_warp();
        if constexpr (kSplitK) Epilogue::Reduction::sync_before();
    }

    DEVICE void consume(const Scheduler& scheduler, const Epilogue& epilogue, OutputTile first_tile,
                        int warp, int warpgroup, int tile_offset) {
        if constexpr (kReallocates) increase_registers<kConsumerRegisters>();
        constexpr int tile_stride = kPingPong ? kConsumers : 1;
        const int num_k_tiles = scheduler.num_k_tiles;
        typename Mainloop::WorkTile work{};
        work.num_k_tiles = num_k_tiles;
        work.first_k_tile = scheduler.first_k_tile;
        work.consumer = warpgroup;
        work.row = Mainloop::kCooperative ? warpgroup * Mainloop::kConsumerRows : 0;
        work.state.skip(tile_offset * num_k_tiles);
        typename Epilogue::Consumer consumer(epilogue, storage, work, warp, warpgroup);
        bool done = false;
        if constexpr (Epilogue::kBackToBack) done = consumer.run_back_to_back(scheduler);
        if (!done) do {
                const int index =
                    scheduler.first + (tile_offset + work.count * tile_stride) * scheduler.step;
                if (index >= scheduler.end) break;
                OutputTile tile{};
                if (consumer.needs_tile()) {
                    const bool first = !Mainloop::kFp8 && work.count == 0;
                    tile = first ? first_tile : scheduler.tile(params, index);
                }
                work.first_row = Loader::first_row(tile) + work.row + warp % 4 * kWarpRows;
                work.first_col = Loader::first_col(tile);
                Accumulator accumulator;
                consumer.begin(tile);
                if constexpr (Epilogue::kClears) Mainloop::clear(accumulator);
                Mainloop::mma(storage.mainloop, work, accumulator);
                const int count = work.count++;
                work.state.skip(tile_stride * num_k_tiles * Mainloop::kStagesPerKTile);
                if (!consumer.reduce(tile, count, accumulator)) continue;
                consumer.template store<Scheduler>(tile, count, accumulator);
            } while (!kSplitK);
        consumer.finish();
    }
};

}  // namespace gemm
