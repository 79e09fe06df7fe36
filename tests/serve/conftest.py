"""The tests with Prometheus's tool run where it is installed; `.ci/run` installs it."""

import shutil

collect_ignore = [] if shutil.which("promtool") else ["test_alerts.py", "test_vllm_dashboard.py"]
