"""Mutation testing of the statements that compute: which changes of the code do the golden replays catch?"""
