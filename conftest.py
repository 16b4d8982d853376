"""What pytest needs before it looks into any folder: its own testing tools, and the plugin if it is not installed."""

from importlib.metadata import entry_points

pytest_plugins = ["pytester"]
if "regress" not in entry_points(group="pytest11").names:  # a source tree that was not installed since
    pytest_plugins.append("regress.plugin")
