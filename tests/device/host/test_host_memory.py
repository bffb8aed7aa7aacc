"""What the system tells of memory."""

from gpipe_hpc.device.host import host_memory


def test_memory_is_told_by_the_system():
    free = host_memory.free_bytes()
    assert free is None or 0 < free < 2**50


def test_a_control_group_bounds_what_is_free(tmp_path, monkeypatch):
    """Of Slurm or Kubernetes: the machine has more, but this job has not."""
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("5000\n")
    (tmp_path / "job" / "memory.current").write_text("4000\n")
    (tmp_path / "job" / "memory.stat").write_text("anon 3000\ninactive_file 300\nactive_file 200\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("10\n")
    lines = host_memory._lines
    own = {"/proc/self/cgroup": ["0::/job/step"]}
    monkeypatch.setattr(host_memory, "_lines", lambda path: own.get(str(path)) or lines(path))
    assert host_memory.free_bytes() == 1500
