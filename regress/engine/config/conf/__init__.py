"""Built-in configurations: the last place of every search path, so that any file can inherit from them."""
