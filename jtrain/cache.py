"""Where compiled programs are kept between runs, so that the second start is quick."""

import os
from pathlib import Path


def keep_compiled_programs() -> Path:
    """Turns JAX's persistent compile cache on, for programs of any size; its directory.

    `JAX_COMPILATION_CACHE_DIR` wins; otherwise it lies in the user's cache directory.
    """
    import jax

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    where = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(home) / "jtrain" / "compiled")
    jax.config.update("jax_compilation_cache_dir", str(where))
    # By default only programs that took a second to compile are kept: none of a small model.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return where
