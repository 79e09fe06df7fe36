"""The tests with a browser run where there is one; `.ci/run` installs it."""

from shutil import which

collect_ignore = [] if which("chromium") else ["test_browser.py"]
