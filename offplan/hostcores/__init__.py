"""Products of few rows by the host's cores: a C++ library, built when it is first needed."""
