"""Where compiled programs are kept between runs, so that the second start is quick."""

import contextlib
import os
from pathlib import Path

from jtrain.private import OTHERS


def keep_compiled_programs() -> Path:
    """Turns JAX's persistent compile cache on, for programs of any size; its directory.

    `JAX_COMPILATION_CACHE_DIR` wins; otherwise it lies in the user's cache directory, which nobody
    else may read or write: who can write there can run what he likes. SECURITY.md says so.
    """
    import jax

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    where = Path(said or Path(home) / "jtrain" / "compiled")
    with contextlib.suppress(OSError):  # JAX goes on without one, and says so
        where.mkdir(0o700, parents=True, exist_ok=True)
        if not said and where.stat().st_mode & OTHERS:
            where.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(where))
    # By default only programs that took a second to compile are kept: none of a small model.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return where
