package copilot

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if mode := os.Getenv("COPILOT_TEST_CHILD"); mode != "" {
		os.Exit(procChild(mode))
	}
	os.Exit(m.Run())
}
