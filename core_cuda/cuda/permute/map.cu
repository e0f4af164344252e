// permute_map: how tokens are divided into chunks for thread blocks, and the layout of the workspace.
#include "cuda/permute/map.cuh"

namespace diptych::cuda {
namespace {

int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
int64_t stride_of(int64_t experts) { return round_up(experts, 8); }

struct Chunking {
  int64_t size, count;

  // One page of chunks, unless a chunk would then have more items than 16 bits can count.
  Chunking(int64_t items, bool mask) {
    const int64_t unit = mask ? 32 : 64, even = round_up(ceil_div(items, kPage), unit);
    size = even < unit ? unit : even > 32768 ? 32768 : even;
    count = ceil_div(items, size);
  }
  int64_t bits(int64_t experts) const { return count * (size / 32) * stride_of(experts); }  // words
  int64_t counts(int64_t experts) const { return round_up(count > 0 ? count : 1, kPage) * round_up(experts, kTile); }
};

}  // namespace

int64_t permute_map_workspace_bytes(RoutingMap kind, int64_t items, int64_t experts) {
  const bool mask = kind == RoutingMap::mask;
  const Chunking chunks(items, mask);
  const int64_t bits = mask ? chunks.bits(experts) * static_cast<int64_t>(sizeof(uint32_t)) : 0;
  return bits + chunks.counts(experts) * static_cast<int64_t>(sizeof(uint16_t));
}

Status permute_map(const PermuteMapArgs& args, const Execution& exec) {
  const bool mask = args.kind == RoutingMap::mask;
  MapParams p{};
  p.routing = args.routing.data;
  p.row_id_map = args.row_id_map.as<int>(), p.row_source = args.row_source.as<int>();
  p.tokens_per_expert = args.tokens_per_expert.as<int>(), p.expert_offsets = args.expert_offsets.as<int>();
  const int64_t items = mask ? args.routing.rows() : args.routing.numel();
  const Chunking chunks(items, mask);
  p.items = static_cast<unsigned>(items);
  p.chunk = static_cast<unsigned>(chunks.size), p.chunks = static_cast<int>(chunks.count);
  p.experts = static_cast<int>(args.tokens_per_expert.numel()), p.stride = static_cast<int>(stride_of(p.experts));
  p.tiles = static_cast<int>(ceil_div(p.experts, kTile));
  p.align = args.align, p.rows = static_cast<int>(args.row_source.numel());
  p.bits = args.workspace.as<uint32_t>();
  p.counts = reinterpret_cast<uint16_t*>(p.bits + (mask ? chunks.bits(p.experts) : 0));
  return mask ? map_mask(p, exec) : map_ids(args.routing.dtype, p, exec);
}

}  // namespace diptych::cuda
