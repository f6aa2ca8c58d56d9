"""Descriptions of NVIDIA GPUs for XLA's compiler, so that it compiles where there is no GPU."""

from typing import NamedTuple


class GpuTarget(NamedTuple):
    """Facts of a GPU that XLA compiles for."""

    name: str
    capability: int  # CUDA compute capability, major
    cores: int  # streaming multiprocessors
    fpus: int  # float32 units of a core
    memory: int  # bytes
    bandwidth: int  # bytes a second
    cache: int  # bytes of the L2 cache
    shared: int  # bytes of shared memory of a core
    clock: float  # GHz

    def text(self) -> str:
        """Return the description as XLA reads it, a GpuTargetConfigProto in text form."""
        accelerated = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.fpus}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth}
              device_memory_size: {self.memory}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}
              cuda_compute_capability {{
                major: {self.capability}
                feature_extension: {accelerated}
              }}
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
              compile_time_toolkit_version: "12.8.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


# Source: openxla/xla, xla/backends/gpu/target_config/specs (November 2026).
GPU_TARGETS: dict[str, GpuTarget] = {
    "a100": GpuTarget(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 64, 85100068864),
        *(2039040000000, 41943040, 167936, 1.41),
    ),
    "h100": GpuTarget(
        *("NVIDIA H100 80GB HBM3", 9, 132, 128, 84942979072),
        *(3352320000000, 52428800, 233472, 1.98),
    ),
    "h200": GpuTarget(
        *("NVIDIA H200 141GB HBM3e", 9, 132, 128, 151397597184),
        *(4800000000000, 52428800, 233472, 1.98),
    ),
    "b200": GpuTarget(
        *("NVIDIA B200", 10, 148, 128, 191514411008),
        *(7672320000000, 132644864, 233472, 1.965),
    ),
}
"""GPUs, by the names in a topology such as `h100:8`."""

FRACTION = 0.75
"""Share of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.

Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html.
"""
