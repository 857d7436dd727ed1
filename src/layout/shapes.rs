//! Constructors for the shapes engines really use.
