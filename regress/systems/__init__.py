"""Other people's trainers as systems under test, judged against a float64 truth of the same recorded batch."""
