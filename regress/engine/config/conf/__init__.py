"""Built-in configurations: the last place of every search path, so that anybody's file can inherit from them."""
