package copilot

import (
	"os"
	"strings"
	"testing"
)

// TestMain makes the test binary play the CLI, or its host, where a test has started it as a child.
func TestMain(m *testing.M) {
	child := os.Getenv("COPILOT_TEST_CHILD")
	switch mode, script, _ := strings.Cut(child, ":"); mode {
	case "":
		os.Exit(m.Run())
	case "spine":
		os.Exit(spineChild(script))
	default:
		os.Exit(procChild(child))
	}
}
