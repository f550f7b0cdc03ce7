"""Published runs replayed: each row of a table predicted, and the prediction set beside what was measured."""
