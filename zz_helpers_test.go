package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// helperCall is one helper: what it sends and what it makes of the answer.
type helperCall struct {
	name   string
	call   func(ctx context.Context, c *Client, s *Session) (any, error)
	method string
	params string // SESSION stands for the session's id
	result string
	want   any // nil for helpers that return no more than an error
}

func only(err error) (any, error) { return nil, err }

const stamp = `"2026-01-02T03:04:05.678Z"`

func helperCalls() []helperCall {
	type ctx = context.Context
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	yes := true
	return []helperCall{
		{"Ping", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Ping(ctx, "a<b") }, "ping", `{"message":"a<b"}`,
			`{"message":"pong: a<b","timestamp":` + stamp + `,"protocolVersion":3}`, PingResult{"pong: a<b", at, 3}},
		{"Ping empty", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Ping(ctx, "") }, "ping", `{}`, `{"message":"pong"}`, PingResult{Message: "pong"}},
		{"Status", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Status(ctx) }, "status.get", `{}`,
			`{"version":"1.0.102","protocolVersion":3}`, Status{"1.0.102", 3}},
		{"AuthStatus", func(ctx ctx, c *Client, s *Session) (any, error) { return c.AuthStatus(ctx) }, "auth.getStatus", `{}`,
			`{"isAuthenticated":true,"authType":"user","host":"h","login":"l","statusMessage":"m"}`, AuthStatus{true, "user", "h", "l", "m"}},
		{"Quota", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Quota(ctx) }, "account.getQuota", `{}`,
			`{"quotaSnapshots":{"chat":{"entitlementRequests":-1,"usedRequests":7,"remainingPercentage":99.5,"resetDate":` + stamp + `}}}`,
			Quota{map[string]QuotaSnapshot{"chat": {EntitlementRequests: -1, UsedRequests: 7, RemainingPercentage: 99.5, ResetDate: &at}}}},
		{"Sessions", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Sessions(ctx, nil) }, "session.list", `{}`,
			`{"sessions":[{"sessionId":"a","startTime":` + stamp + `,"modifiedTime":` + stamp + `,"isRemote":false,"summary":"s","name":"n","clientName":"sdk","context":{"cwd":"/w","branch":"b"}},
			  {"sessionId":"b","isRemote":true,"repository":{"owner":"o","name":"r","branch":"b"},"remoteSessionIds":["x"],"pullRequestNumber":5,"resourceId":"i","taskType":"cli","state":"done"}]}`,
			[]SessionInfo{{SessionID: "a", StartTime: at, ModifiedTime: at, Summary: "s", Name: "n", ClientName: "sdk", Context: &WorkingDirectoryContext{CWD: "/w", Branch: "b"}},
				{SessionID: "b", IsRemote: true, Repository: &RemoteRepository{"o", "r", "b"}, RemoteSessionIDs: []string{"x"}, PullRequestNumber: 5, ResourceID: "i", TaskType: "cli", State: "done"}}},
		{"Sessions filter", func(ctx ctx, c *Client, s *Session) (any, error) {
			return c.Sessions(ctx, &SessionFilter{CWD: "/w", GitRoot: "/g", Repository: "o/r", Branch: "b"})
		}, "session.list", `{"filter":{"cwd":"/w","gitRoot":"/g","repository":"o/r","branch":"b"}}`, `{"sessions":[]}`, []SessionInfo{}},
		{"SessionInfo", func(ctx ctx, c *Client, s *Session) (any, error) { return c.SessionInfo(ctx, "x") }, "session.getMetadata", `{"sessionId":"x"}`,
			`{"session":{"sessionId":"x","isDetached":true}}`, &SessionInfo{SessionID: "x", IsDetached: true}},
		{"LastSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return c.LastSessionID(ctx) }, "session.getLastId", `{}`, `{"sessionId":"x"}`, "x"},
		{"ForegroundSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForegroundSessionID(ctx) }, "session.getForeground", `{}`, `{"sessionId":"x","workspacePath":"/w"}`, "x"},
		{"SetForegroundSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return only(c.SetForegroundSessionID(ctx, "x")) }, "session.setForeground", `{"sessionId":"x"}`, `{"success":true}`, nil},
		{"DeleteSession", func(ctx ctx, c *Client, s *Session) (any, error) { return only(c.DeleteSession(ctx, "x")) }, "session.delete", `{"sessionId":"x"}`, `{"success":true}`, nil},
		{"ForkSession", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForkSession(ctx, "x", "e") }, "sessions.fork", `{"sessionId":"x","toEventId":"e"}`, `{"sessionId":"y","name":"n"}`, "y"},
		{"ForkSession whole", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForkSession(ctx, "x", "") }, "sessions.fork", `{"sessionId":"x"}`, `{"sessionId":"y"}`, "y"},
		{"Client.SendTelemetry", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(c.SendTelemetry(ctx, TelemetryEvent{Kind: "k", Properties: map[string]string{"p": "v"}, Metrics: map[string]float64{"m": 1.5}}))
		}, "sendTelemetry", `{"clientName":"sdk","kind":"k","properties":{"p":"v"},"metrics":{"m":1.5}}`, `{}`, nil},
		{"Session.SendTelemetry", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SendTelemetry(ctx, TelemetryEvent{Kind: "k", ClientName: "mine"}))
		}, "session.sendTelemetry", `{"sessionId":"SESSION","kind":"k"}`, `null`, nil},
		{"Model", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Model(ctx) }, "session.model.getCurrent", `{"sessionId":"SESSION"}`,
			`{"modelId":"m","reasoningEffort":"high","contextTier":"default","autoTier":"fast","pendingAutoTier":null}`, CurrentModel{"m", "high", "default", "fast"}},
		{"SetModel", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetModel(ctx, "m", nil)) }, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m"}`,
			`{"status":"applied","deferred":false,"modelId":"m"}`, nil},
		{"SetModel options", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetModel(ctx, "m", &ModelOptions{ReasoningEffort: "low", ReasoningSummary: "none", ContextTier: "default", AutoTier: "fast",
				ModelCapabilities: &ModelCapabilities{Supports: &ModelSupports{Vision: &yes}}}))
		}, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m","reasoningEffort":"low","reasoningSummary":"none","contextTier":"default","autoTier":"fast",
			"modelCapabilities":{"supports":{"vision":true}}}`, `{}`, nil},
		{"SetModel reset", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetModel(ctx, "m", &ModelOptions{ResetReasoningEffort: true}))
		}, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m","reasoningEffort":null}`, `{}`, nil},
		{"Mode", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Mode(ctx) }, "session.mode.get", `{"sessionId":"SESSION"}`, `"plan"`, AgentModePlan},
		{"SetMode", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetMode(ctx, AgentModeAutopilot)) }, "session.mode.set", `{"sessionId":"SESSION","mode":"autopilot"}`,
			`{"status":"unchanged","modelChanged":false,"modeApplied":true}`, nil},
		{"Name", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Name(ctx) }, "session.name.get", `{"sessionId":"SESSION"}`, `{"name":"n"}`, "n"},
		{"Name none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Name(ctx) }, "session.name.get", `{"sessionId":"SESSION"}`, `{"name":null}`, ""},
		{"SetName", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetName(ctx, "n")) }, "session.name.set", `{"sessionId":"SESSION","name":"n"}`, `null`, nil},
		{"ReadPlan", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadPlan(ctx) }, "session.plan.read", `{"sessionId":"SESSION"}`,
			`{"exists":true,"content":"# P","path":"/p"}`, Plan{true, "# P", "/p"}},
		{"ReadPlan none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadPlan(ctx) }, "session.plan.read", `{"sessionId":"SESSION"}`,
			`{"exists":false,"content":null,"path":"/p"}`, Plan{Path: "/p"}},
		{"UpdatePlan", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.UpdatePlan(ctx, "# P")) }, "session.plan.update", `{"sessionId":"SESSION","content":"# P"}`, `null`, nil},
		{"DeletePlan", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.DeletePlan(ctx)) }, "session.plan.delete", `{"sessionId":"SESSION"}`, `null`, nil},
		{"WorkspaceFiles", func(ctx ctx, c *Client, s *Session) (any, error) { return s.WorkspaceFiles(ctx) }, "session.workspaces.listFiles", `{"sessionId":"SESSION"}`,
			`{"files":["a","b/c"]}`, []string{"a", "b/c"}},
		{"ReadWorkspaceFile", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadWorkspaceFile(ctx, "a") }, "session.workspaces.readFile", `{"sessionId":"SESSION","path":"a"}`,
			`{"content":"x"}`, "x"},
		{"CreateWorkspaceFile", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.CreateWorkspaceFile(ctx, "a", "x")) }, "session.workspaces.createFile",
			`{"sessionId":"SESSION","path":"a","content":"x"}`, `null`, nil},
		{"StartFleet", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.StartFleet(ctx, "p")) }, "session.fleet.start", `{"sessionId":"SESSION","prompt":"p"}`, `{"started":true}`, nil},
		{"StartFleet alone", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.StartFleet(ctx, "")) }, "session.fleet.start", `{"sessionId":"SESSION"}`, `{"started":true}`, nil},
		{"Compact", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Compact(ctx) }, "session.history.compact", `{"sessionId":"SESSION"}`,
			`{"success":true,"tokensRemoved":9,"messagesRemoved":3,"summaryContent":"s","contextWindow":{"tokenLimit":6,"currentTokens":5,"messagesLength":4,"systemTokens":3,"conversationTokens":2,"toolDefinitionsTokens":1}}`,
			Compaction{true, 9, 3, "s", &ContextWindow{6, 5, 4, 3, 2, 1}}},
		{"Log", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.Log(ctx, "m", nil)) }, "session.log", `{"sessionId":"SESSION","message":"m"}`, `{"eventId":"e"}`, nil},
		{"Log options", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.Log(ctx, "m", &LogOptions{Level: LogError, Type: "t", Ephemeral: true, URL: "u", Tip: "x"}))
		}, "session.log", `{"sessionId":"SESSION","message":"m","level":"error","type":"t","ephemeral":true,"url":"u","tip":"x"}`, `{"eventId":"e"}`, nil},
		{"Agents", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agents(ctx) }, "session.agent.list", `{"sessionId":"SESSION"}`,
			`{"agents":[{"id":"i","name":"n","displayName":"d","description":"x","tools":[],"source":"user"}]}`,
			[]AgentInfo{{ID: "i", Name: "n", DisplayName: "d", Description: "x", Tools: &[]string{}, Source: "user"}}},
		{"Agent", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agent(ctx) }, "session.agent.getCurrent", `{"sessionId":"SESSION"}`, `{"agent":{"id":"i"}}`, &AgentInfo{ID: "i"}},
		{"Agent none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agent(ctx) }, "session.agent.getCurrent", `{"sessionId":"SESSION"}`, `{"agent":null}`, (*AgentInfo)(nil)},
		{"SelectAgent", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SelectAgent(ctx, "n")) }, "session.agent.select", `{"sessionId":"SESSION","name":"n"}`, `{"agent":{}}`, nil},
		{"SelectAgent none", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SelectAgent(ctx, "")) }, "session.agent.deselect", `{"sessionId":"SESSION"}`, `{}`, nil},
		{"Skills", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Skills(ctx) }, "session.skills.list", `{"sessionId":"SESSION"}`,
			`{"skills":[{"name":"n","description":"d","source":"builtin","enabled":true}]}`, []LoadedSkill{{Name: "n", Description: "d", Source: "builtin", Enabled: true}}},
		{"MCPServers", func(ctx ctx, c *Client, s *Session) (any, error) { return s.MCPServers(ctx) }, "session.mcp.list", `{"sessionId":"SESSION"}`,
			`{"servers":[{"name":"n","status":"needs-auth"}],"host":{"clients":[]}}`, []LoadedMCPServer{{Name: "n", Status: "needs-auth"}}},
		{"Tools", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tools(ctx) }, "session.tools.getCurrentMetadata", `{"sessionId":"SESSION"}`,
			`{"tools":[{"name":"n","description":"d","input_schema":{"type":"object"},"mcpServerName":"s","mcpToolName":"t","namespacedName":"s/t","deferLoading":true}]}`,
			[]ToolInfo{{"n", "s/t", "s", "t", "d", json.RawMessage(`{"type":"object"}`), true}}},
		{"Tools none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tools(ctx) }, "session.tools.getCurrentMetadata", `{"sessionId":"SESSION"}`, `{"tools":null}`, []ToolInfo(nil)},
		{"Tasks", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tasks(ctx) }, "session.tasks.list", `{"sessionId":"SESSION"}`,
			`{"tasks":[{"type":"shell","id":"1","description":"d","status":"running","startedAt":` + stamp + `,"command":"c","pid":42,"logPath":"/l"},
			  {"type":"agent","id":"2","status":"idle","completedAt":` + stamp + `,"toolCallId":"t","agentType":"task","prompt":"p","latestResponse":"r","displayName":"n","error":"e"}]}`,
			[]TaskInfo{{Type: "shell", ID: "1", Description: "d", Status: "running", StartedAt: at, Command: "c", PID: 42, LogPath: "/l"},
				{Type: "agent", ID: "2", Status: "idle", CompletedAt: &at, ToolCallID: "t", AgentType: "task", Prompt: "p", LatestResponse: "r", DisplayName: "n", Error: "e"}}},
		{"CancelTask", func(ctx ctx, c *Client, s *Session) (any, error) { return s.CancelTask(ctx, "1") }, "session.tasks.cancel", `{"sessionId":"SESSION","id":"1"}`, `{"cancelled":true}`, true},
		{"Queue", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Queue(ctx) }, "session.queue.pendingItems", `{"sessionId":"SESSION"}`,
			`{"items":[{"id":"q","messageId":"m","kind":"message","displayText":"t","agentMode":"plan","source":"s"}],"steeringMessages":["x"]}`,
			Queue{[]QueueItem{{"q", "m", "message", "t", AgentModePlan, "s"}}, []string{"x"}}},
		{"ClearQueue", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.ClearQueue(ctx)) }, "session.queue.clear", `{"sessionId":"SESSION"}`, `null`, nil},
		{"Usage", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Usage(ctx) }, "session.usage.getMetrics", `{"sessionId":"SESSION"}`,
			`{"totalPremiumRequestCost":0.5,"totalUserRequests":2,"totalNanoAiu":0.25,"totalApiDurationMs":17,"sessionStartTime":` + stamp + `,"currentModel":"m",
			  "codeChanges":{"linesAdded":1,"linesRemoved":2,"filesModified":["f"]},"modelMetrics":{"m":{"requests":{"count":1,"cost":0.5},"usage":{"inputTokens":5295,"outputTokens":2}}},
			  "agentMetrics":{"main":{"totalApiDurationMs":17}},"tokenDetails":{"input":{"tokenCount":3}},"lastCallInputTokens":4,"lastCallOutputTokens":5}`,
			Usage{at, "m", 0.5, 2, 0.25, 17, map[string]TokenCount{"input": {3}},
				map[string]ModelMetric{"m": {Requests: ModelRequests{Count: 1, Cost: 0.5}, Usage: ModelUsage{InputTokens: 5295, OutputTokens: 2}}},
				map[string]AgentMetric{"main": {TotalAPIDurationMs: 17}}, CodeChanges{LinesAdded: 1, LinesRemoved: 2, FilesModified: []string{"f"}}, 4, 5}},
		{"PermissionMode", func(ctx ctx, c *Client, s *Session) (any, error) { return s.PermissionMode(ctx) }, "session.permissions.getMode", `{"sessionId":"SESSION"}`, `{"mode":"manual"}`, PermissionsManual},
		{"SetPermissionMode", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetPermissionMode(ctx, PermissionsAllowAll))
		}, "session.permissions.setMode",
			`{"sessionId":"SESSION","mode":"allow-all"}`, `{"success":true,"mode":"allow-all"}`, nil},
		{"Truncate", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Truncate(ctx, "e") }, "session.history.truncate", `{"sessionId":"SESSION","eventId":"e"}`, `{"eventsRemoved":4}`, 4},
	}
}

func sameJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

func TestHelperCalls(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	answered := make(map[string]int)
	for _, tt := range helperCalls() {
		t.Run(tt.name, func(t *testing.T) {
			ctx := testContext(t)
			run := func(result any) (any, error) {
				p.handle(tt.method, func(*peer, peerMessage) any { return result })
				answered[tt.method]++
				return tt.call(ctx, c, s)
			}
			got, err := run(json.RawMessage(tt.result))
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, error %v, want %+v", got, err, tt.want)
			}
			calls := p.calls(tt.method)
			params := strings.ReplaceAll(tt.params, "SESSION", s.ID())
			if len(calls) == 0 || !sameJSON(calls[len(calls)-1].Params, []byte(params)) {
				t.Fatalf("sent %s, want %s", calls[len(calls)-1].Params, params)
			}
			for _, empty := range []string{"null", "{}", `{ "fromTheFuture": {"a": [1]} }`} {
				got, err := run(json.RawMessage(empty))
				if err != nil || got != nil && !reflect.ValueOf(got).IsZero() {
					t.Errorf("result %s: got %+v, error %v, want nothing", empty, got, err)
				}
			}
			if tt.want != nil {
				bad := []string{"7", "[1]"}
				if i := strings.Index(tt.result, stamp); i >= 0 {
					bad = append(bad, tt.result[:i]+`"`+strings.Repeat("x", 1<<16)+`"`+tt.result[i+len(stamp):])
				}
				for _, odd := range bad {
					got, err := run(json.RawMessage(odd))
					if err == nil || len(err.Error()) > 512 || !strings.Contains(err.Error(), tt.method) || got != nil && !reflect.ValueOf(got).IsZero() {
						t.Errorf("result %.40s: got %.60v, error %.600v, want a short error that names the method", odd, got, err)
					}
				}
			}
			_, err = run(&peerError{Code: -32601, Message: "Unhandled method " + tt.method, Data: json.RawMessage(`{"a":1}`)})
			var refused *RPCError
			if !errors.As(err, &refused) || refused.Method != tt.method || string(refused.Data) != `{"a":1}` || !errors.Is(err, ErrNotSupported) {
				t.Errorf("refused: got %v, want the server's error", err)
			}
		})
	}
	for method, n := range answered {
		if got := len(p.calls(method)); got < n {
			t.Errorf("%s was sent %d times for %d calls", method, got, n)
		}
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	before := len(p.calls(""))
	for _, tt := range helperCalls() {
		if strings.Contains(tt.params, "SESSION") {
			var which *SessionError
			if _, err := tt.call(testContext(t), c, s); !errors.Is(err, ErrClosed) || !errors.As(err, &which) || which.SessionID != s.ID() {
				t.Errorf("%s after Disconnect: got %v, want ErrClosed", tt.name, err)
			}
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests after Disconnect", got-before)
	}
}

// TestHelperRefusals has the answers that say in their body that nothing was done.
func TestHelperRefusals(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	ctx := testContext(t)
	for _, tt := range []struct {
		method string
		call   func(id string) error
	}{
		{"session.delete", func(id string) error { return c.DeleteSession(ctx, id) }},
		{"session.setForeground", func(id string) error { return c.SetForegroundSessionID(ctx, id) }},
		{"session.permissions.setMode", func(string) error { return s.SetPermissionMode(ctx, PermissionsAllowAll) }},
		{"session.abort", func(string) error { return s.Abort(ctx) }},
	} {
		words := "Session file not found for " + s.ID()
		p.handle(tt.method, func(*peer, peerMessage) any { return map[string]any{"success": false, "error": words} })
		err := tt.call(s.ID())
		var refused *RPCError
		var which *SessionError
		if !errors.As(err, &refused) || refused.Method != tt.method || refused.Message != words || !errors.Is(err, ErrSessionNotFound) {
			t.Errorf("%s: got %v, want the server's refusal", tt.method, err)
		} else if !errors.As(err, &which) || which.SessionID != s.ID() || strings.Contains(err.Error(), s.ID()) {
			t.Errorf("%s: got %v, want an error that has the id and does not show it", tt.method, err)
		}
	}
	p.handle("session.fleet.start", func(*peer, peerMessage) any { return map[string]any{"started": false} })
	var refused *RPCError
	if err := s.StartFleet(ctx, ""); !errors.As(err, &refused) {
		t.Errorf("fleet: got %v, want a refusal", err)
	}
	if err := s.Context().Err(); err != nil {
		t.Errorf("the session has ended: %v", context.Cause(s.Context()))
	}

	before := len(p.calls(""))
	for name, err := range map[string]error{
		"level":  s.Log(ctx, "m", &LogOptions{Level: "loud"}),
		"effort": s.SetModel(ctx, "m", &ModelOptions{ReasoningEffort: "high", ResetReasoningEffort: true}),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: got %v, want ErrInvalidConfig", name, err)
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests for invalid parameters", got-before)
	}
}

func TestSessionInfoNone(t *testing.T) {
	c, _ := newPeer(t, nil) // which answers {}
	if info, err := c.SessionInfo(testContext(t), "x"); info != nil || err != nil {
		t.Errorf("got %v, %v, want nothing", info, err)
	}
}

func TestDeleteSessionEndsIt(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	defer sub.Close()
	p.handle("session.delete", func(*peer, peerMessage) any { return map[string]any{"success": true} })
	if err := c.DeleteSession(testContext(t), s.ID()); err != nil {
		t.Fatal(err)
	}
	await(t, "the session's end", s.Context().Done())
	if _, err := sub.Next(testContext(t)); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("sequence ends with %v", err)
	}
	if _, err := s.Send(testContext(t), Message{}); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("send: %v", err)
	}
	if n := len(p.calls("session.destroy")); n != 0 {
		t.Errorf("%d destroys for a session that is gone", n)
	}
	if _, err := c.CreateSession(testContext(t), &SessionConfig{SessionID: s.ID()}); err != nil {
		t.Errorf("again under its id: %v", err)
	}
}

func TestModelsSingleFlight(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	release := make(chan any)
	p.handle("models.list", func(p *peer, m peerMessage) any {
		go func() { p.answer(m.ID, <-release) }() // ends with the test, which answers every request
		return noAnswer
	})
	ctx := testContext(t)

	// Callers whose ctx ends leave; the call goes on for the others.
	leaving, leave := context.WithCancel(ctx)
	left := async(func() error { _, err := c.Models(leaving); return err })
	p.wait("models.list", 1)
	const others = 8
	lists := make(chan []Model, others)
	results := make(chan error, others)
	for range others {
		go func() { // ends with the answer
			list, err := c.Models(ctx)
			lists <- list
			results <- err
		}()
	}
	for joined := 0; joined < others+1; { // all wait for the same load
		c.models.mu.Lock()
		joined = c.models.load.waiting
		c.models.mu.Unlock()
	}
	leave()
	if err := await(t, "caller that left", left); !errors.Is(err, context.Canceled) {
		t.Errorf("left with %v", err)
	}
	release <- &peerError{Code: -32603, Message: "Not authenticated. Please authenticate first."}
	for range others {
		await(t, "list", lists)
		if err := await(t, "result", results); !errors.Is(err, ErrAuthentication) {
			t.Errorf("got %v, want ErrAuthentication", err)
		}
	}

	// Errors are not kept. A call that nobody waits for is given up, and its answer with it.
	gone, cancel := context.WithCancel(ctx)
	left = async(func() error { _, err := c.Models(gone); return err })
	p.wait("models.list", 2)
	cancel()
	await(t, "last caller", left)
	release <- map[string]any{"models": []any{map[string]any{"id": "stale"}}}
	p.sync()

	again := async(func() error {
		list, err := c.Models(ctx)
		if err == nil && (len(list) != 1 || list[0].ID != "m" || *list[0].Capabilities.Limits.MaxPromptTokens != 5 || list[0].Capabilities.Supports == nil) {
			err = fmt.Errorf("got %+v", list)
		}
		return err
	})
	p.wait("models.list", 3)
	release <- map[string]any{"models": []any{map[string]any{"id": "m", "capabilities": map[string]any{"limits": map[string]any{"max_prompt_tokens": 5}}}}}
	if err := await(t, "models", again); err != nil {
		t.Fatal(err)
	}

	// A success is kept, and every caller has a list of its own.
	first, err := c.Models(ctx)
	if err != nil {
		t.Fatal(err)
	}
	first[0].ID, *first[0].Capabilities.Limits.MaxPromptTokens = "changed", 0
	second, err := c.Models(ctx)
	if err != nil || second[0].ID != "m" || *second[0].Capabilities.Limits.MaxPromptTokens != 5 {
		t.Errorf("got %+v, %v after another caller changed its list", second, err)
	}
	if n := len(p.calls("models.list")); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
	if _, err := c.Models(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("with a ctx that is done: %v", err)
	}
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Models(ctx); !errors.Is(err, ErrClosed) {
		t.Errorf("after Stop: %v", err)
	}
}

func TestModelsBadAnswer(t *testing.T) {
	c, p := newPeer(t, nil)
	for _, bad := range []string{`{"models":7}`, `{"models":[{"id":1}]}`, `[]`} {
		p.handle("models.list", func(*peer, peerMessage) any { return json.RawMessage(bad) })
		if list, err := c.Models(testContext(t)); err == nil {
			t.Errorf("%s: got %v", bad, list)
		}
	}
	p.handle("models.list", func(*peer, peerMessage) any { return json.RawMessage(`null`) })
	for range 2 {
		if list, err := c.Models(testContext(t)); err != nil || len(list) != 0 {
			t.Errorf("null: got %v, %v", list, err)
		}
	}
	if n := len(p.calls("models.list")); n != 4 {
		t.Errorf("%d requests: an error was kept, or a success was not", n)
	}
}

func TestListModels(t *testing.T) {
	leakCheck(t)
	var calls atomic.Int32
	full := make([]Model, 2)
	fill(reflect.ValueOf(&full).Elem(), "", false)
	for i := range full {
		full[i].Metadata, full[i].WarningText = json.RawMessage(`{"a":1}`), nil
		full[i].Billing.TokenPrices, full[i].Billing.Promo = nil, nil
	}
	boom := errors.New("boom")
	c, p := newPeer(t, &Options{ListModels: func(ctx context.Context) ([]Model, error) {
		switch calls.Add(1) {
		case 1:
			return nil, boom
		case 2:
			panic("boom")
		}
		return full, nil
	}})
	if _, err := c.Models(testContext(t)); !errors.Is(err, boom) {
		t.Errorf("got %v, want the handler's error", err)
	}
	if _, err := c.Models(testContext(t)); err == nil {
		t.Error("no error from a handler that panicked")
	}
	for range 2 {
		list, err := c.Models(testContext(t))
		if err != nil || !reflect.DeepEqual(list, full) {
			t.Errorf("got %+v, %v, want %+v", list, err, full)
		}
		list[0].SupportedContextTiers[0] = "changed"
	}
	if n := calls.Load(); n != 3 {
		t.Errorf("%d calls, want 3", n)
	}
	if n := len(p.calls("models.list")); n != 0 {
		t.Errorf("the server was asked %d times", n)
	}
}

// A list handler that never returns keeps neither its callers nor the client.
func TestListModelsHangs(t *testing.T) {
	hang, called := make(chan struct{}), make(chan struct{})
	defer close(hang)
	c, _ := newPeer(t, &Options{ListModels: func(context.Context) ([]Model, error) {
		close(called)
		<-hang
		return nil, nil
	}})
	result := async(func() error { _, err := c.Models(context.Background()); return err })
	await(t, "handler", called)
	c.ForceStop()
	if err := await(t, "caller", result); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// TestLogEndsNoTurn has the ways in which a Log's own error event, its answer, an error of the turn's and the turn's end can follow each other.
// Each step is one write of the server's: a is the answer to the Log and to the send, e an event.
func TestLogEndsNoTurn(t *testing.T) {
	const id = "own"
	for _, tt := range []struct {
		name  string
		steps string // what the server sends, in this order
		fails bool   // the turn ends with an error
	}{
		{"event, answer", "sent user own answer done", false},
		{"answer, event", "sent user answer own done", false},
		{"before the turn's message, event first", "sent own answer user done", false},
		{"before the turn's message, answer first", "sent answer own user done", false},
		{"before the send's answer, event first", "user own answer sent done", false},
		{"before the send's answer, answer first", "user answer own sent done", false},
		{"send answered between event and answer", "user own sent answer done", false},
		{"end before the answer", "sent user own done answer", false},
		{"real error, own, answer", "sent user real own answer idle", true},
		{"own, real error, answer", "sent user own real answer idle", true},
		{"real error while the Log is unanswered, its event last", "sent user real answer own idle", true},
		{"real error and end before the answer", "sent user real idle answer own", true},
		{"real error, own and end before the answer", "sent user real own idle answer", true},
		{"Log refused", "sent user real refuse idle", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			s := createSession(t, c, nil)
			hold := func(*peer, peerMessage) any { return noAnswer }
			p.handle("session.send", hold)
			p.handle("session.log", hold)
			type outcome struct {
				m   *AssistantMessage
				err error
			}
			turn := make(chan outcome, 1)
			go func() { // ends with the turn
				m, err := s.SendAndWait(testContext(t), Message{Prompt: "x"})
				turn <- outcome{m, err}
			}()
			send := p.wait("session.send", 1)
			logged := async(func() error { return s.Log(testContext(t), "m", &LogOptions{Level: LogError}) })
			log := p.wait("session.log", 1)
			failure := map[string]any{"errorType": "notification", "message": "m"}
			for _, step := range strings.Fields(tt.steps) {
				switch step {
				case "sent":
					p.answer(send.ID, map[string]any{"messageId": "m1"})
				case "user":
					p.emit(s.ID(), "user.message", map[string]any{"content": "x", "messageId": "m1"})
				case "own":
					p.emit(s.ID(), "session.error", failure, "id", id)
				case "real":
					p.emit(s.ID(), "session.error", map[string]any{"errorType": "query", "message": "real"}, "id", "other")
				case "answer":
					p.answer(log.ID, map[string]any{"eventId": id})
				case "refuse":
					p.answer(log.ID, &peerError{Code: -32603, Message: "no"})
				case "done":
					p.send(p.event(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": "good"}), p.event(s.ID(), "session.idle", nil))
				case "idle":
					p.emit(s.ID(), "session.idle", nil)
				}
			}
			got := await(t, "turn", turn)
			var agent *AgentError
			switch {
			case !tt.fails && (got.err != nil || got.m == nil || got.m.Content != "good"):
				t.Errorf("got %+v, %v, want the turn's message", got.m, got.err)
			case tt.fails && (!errors.As(got.err, &agent) || agent.Message != "real"):
				t.Errorf("got %+v, %v, want the turn's error", got.m, got.err)
			}
			if err := await(t, "log", logged); err != nil && !strings.Contains(tt.steps, "refuse") {
				t.Error(err)
			}
			p.sync()
			s.mu.Lock()
			if ts := &s.turns; ts.logging != 0 || len(ts.logged) != 0 || len(ts.recent) != 0 || ts.busy {
				t.Errorf("left behind: %+v", ts)
			}
			s.mu.Unlock()

			// The next turn starts clean.
			p.handle("session.send", func(*peer, peerMessage) any { return map[string]any{"messageId": "m2"} })
			next := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
			p.wait("session.send", 2)
			p.sync()
			p.send(p.event(s.ID(), "user.message", map[string]any{"messageId": "m2"}), p.event(s.ID(), "session.idle", nil))
			if err := await(t, "next turn", next); err != nil {
				t.Error(err)
			}
		})
	}
}

// A Log whose caller has gone still counts: its event may come.
func TestLogCancelled(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	p.handle("session.log", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancel(testContext(t))
	logged := async(func() error { return s.Log(ctx, "m", &LogOptions{Level: LogError}) })
	log := p.wait("session.log", 1)
	cancel()
	if err := await(t, "log", logged); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.sync()
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"message": "m"}, "id", "own")
	p.answer(log.ID, map[string]any{"eventId": "own"})
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Error(err)
	}
	if _, err := c.Ping(ctx, ""); !errors.Is(err, context.Canceled) { // the same ctx, before anything is written
		t.Error(err)
	}
	if err := s.Log(ctx, "m", &LogOptions{Level: LogError}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.turns.logging != 0 {
		t.Errorf("%d Logs in flight", s.turns.logging)
	}
}

func TestCapabilitiesAndCanvases(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	canvas := func(id, title string) map[string]any {
		return map[string]any{"instanceId": id, "extensionId": "x", "canvasId": "c", "title": title, "input": map[string]any{"n": 1}}
	}
	// What follows the answer in the same write is newer than the answer, whichever goroutine takes that over.
	p.handle("session.create", func(p *peer, m peerMessage) any {
		id := m.get("sessionId").(string)
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"sessionId": id, "workspacePath": "/w", "remoteUrl": "u",
			"capabilities": map[string]any{"ui": map[string]any{"elicitation": false, "canvases": true}, "extensions": true},
			"openCanvases": []any{canvas("1", "one"), canvas("2", "two")}}},
			p.event(id, "capabilities.changed", map[string]any{"ui": map[string]any{"elicitation": true}}),
			p.event(id, "session.canvas.closed", map[string]any{"instanceId": "1"}))
		return noAnswer
	})
	s := createSession(t, c, nil)
	p.sync()
	if want := (Capabilities{UI: UICapabilities{Elicitation: true, Canvases: true}, Extensions: true}); s.Capabilities() != want {
		t.Errorf("capabilities are %+v, want %+v", s.Capabilities(), want)
	}
	if s.WorkspacePath() != "/w" || s.RemoteURL() != "u" {
		t.Errorf("workspace %q, URL %q", s.WorkspacePath(), s.RemoteURL())
	}
	titles := func() (list []string) {
		for _, c := range s.OpenCanvases() {
			list = append(list, c.InstanceID+" "+c.Title)
		}
		return list
	}
	check := func(what string, want ...string) {
		t.Helper()
		if got := titles(); !slices.Equal(got, want) {
			t.Errorf("%s: canvases are %q, want %q", what, got, want)
		}
	}
	check("start", "2 two")

	// An event's effect is there before a subscriber can see the event.
	sub := s.Subscribe()
	defer sub.Close()
	for _, tt := range []struct {
		typ  string
		data any
		want []string
	}{
		{"session.canvas.opened", canvas("3", "three"), []string{"2 two", "3 three"}},
		{"session.canvas.opened", canvas("2", "new"), []string{"2 new", "3 three"}},
		{"session.canvas.opened", canvas("", "none"), []string{"2 new", "3 three"}},
		{"session.canvas.opened", map[string]any{"instanceId": 7}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": ""}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": "9"}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", nil, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": "2"}, []string{"3 three"}},
	} {
		p.emit(s.ID(), tt.typ, tt.data)
		next(t, sub)
		check(tt.typ, tt.want...)
	}
	mine := s.OpenCanvases()
	mine[0].Title, mine[0].Input[0] = "changed", 'X'
	check("after a caller changed its copy", "3 three")
	if got := s.OpenCanvases()[0].Input[0]; got != '{' {
		t.Errorf("input begins with %c", got)
	}

	for _, tt := range []struct {
		data any
		want Capabilities
	}{
		{map[string]any{"ui": map[string]any{"mcpApps": true}}, Capabilities{UICapabilities{true, true, true}, true}},
		{map[string]any{"ui": map[string]any{"elicitation": false}, "extensions": nil}, Capabilities{UICapabilities{false, true, true}, true}},
		{map[string]any{"ui": nil}, Capabilities{UICapabilities{false, true, true}, true}},
		{map[string]any{"ui": map[string]any{"canvases": "no"}}, Capabilities{UICapabilities{false, true, true}, true}},
		{nil, Capabilities{UICapabilities{false, true, true}, true}},
		{map[string]any{"extensions": false}, Capabilities{UICapabilities{false, true, true}, false}},
	} {
		p.emit(s.ID(), "capabilities.changed", tt.data)
		next(t, sub)
		if got := s.Capabilities(); got != tt.want {
			t.Errorf("after %v: %+v, want %+v", tt.data, got, tt.want)
		}
	}
}

// elicitingPeer returns a session whose clients can show forms.
func elicitingPeer(t *testing.T) (*Session, *peer) {
	c, p := newPeer(t, nil)
	p.handle("session.create", func(p *peer, m peerMessage) any {
		return map[string]any{"sessionId": m.get("sessionId"), "capabilities": map[string]any{"ui": map[string]any{"elicitation": true}}}
	})
	return createSession(t, c, nil), p
}

func TestUI(t *testing.T) {
	leakCheck(t)
	s, p := elicitingPeer(t)
	ctx := testContext(t)
	type answer = map[string]any
	confirm := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		yes, err := s.UI().Confirm(ctx, "m")
		return yes, yes, err
	}
	choose := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		return s.UI().Select(ctx, "m", []string{"a", "b"})
	}
	input := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		return s.UI().Input(ctx, "m", &InputOptions{Title: "t", Description: "d", MinLength: 1, MaxLength: 9, Format: "email", Default: "x"})
	}
	for _, tt := range []struct {
		name   string
		call   func(result any) (any, bool, error)
		params string
		result any
		want   any
		ok     bool
	}{
		{"confirm yes", confirm, `{"type":"boolean","default":true}`, answer{"action": "accept", "content": answer{"confirmed": true}}, true, true},
		{"confirm no", confirm, "", answer{"action": "accept", "content": answer{"confirmed": false}}, false, false},
		{"confirm text", confirm, "", answer{"action": "accept", "content": answer{"confirmed": "true"}}, false, false},
		{"confirm declined", confirm, "", answer{"action": "decline", "content": answer{"confirmed": true}}, false, false},
		{"confirm null", confirm, "", nil, false, false},
		{"select", choose, `{"type":"string","enum":["a","b"]}`, answer{"action": "accept", "content": answer{"selection": "b"}}, "b", true},
		{"select number", choose, "", answer{"action": "accept", "content": answer{"selection": 1}}, "", false},
		{"select cancelled", choose, "", answer{"action": "cancel"}, "", false},
		{"input", input, `{"type":"string","title":"t","description":"d","minLength":1,"maxLength":9,"format":"email","default":"x"}`,
			answer{"action": "accept", "content": answer{"value": ""}}, "", true},
		{"input list", input, "", answer{"action": "accept", "content": answer{"value": []string{"a"}}}, "", false},
		{"input without content", input, "", answer{"action": "accept"}, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok, err := tt.call(tt.result)
			if err != nil || got != tt.want || ok != tt.ok {
				t.Errorf("got %v, %v, %v, want %v, %v", got, ok, err, tt.want, tt.ok)
			}
			calls := p.calls("session.ui.elicitation")
			var sent struct {
				Message         string
				RequestedSchema struct {
					Type       string
					Properties map[string]json.RawMessage
					Required   []string
				}
			}
			if err := json.Unmarshal(calls[len(calls)-1].Params, &sent); err != nil {
				t.Fatal(err)
			}
			if r := sent.RequestedSchema; sent.Message != "m" || r.Type != "object" || len(r.Required) != 1 || len(r.Properties) != 1 {
				t.Fatalf("sent %+v", sent)
			}
			field := sent.RequestedSchema.Properties[sent.RequestedSchema.Required[0]]
			if tt.params != "" && !sameJSON(field, []byte(tt.params)) {
				t.Errorf("field is %s, want %s", field, tt.params)
			}
		})
	}
	if _, _, err := choose(answer{"action": "accept", "content": answer{"selection": "z"}}); err == nil {
		t.Error("no error for an answer that was no option")
	}
	if _, _, err := s.UI().Select(ctx, "m", nil); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("no options: got %v, want ErrInvalidConfig", err)
	}
	if _, err := s.UI().Elicit(ctx, "m", func() {}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("no schema: got %v, want ErrInvalidConfig", err)
	}
	p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return answer{"action": "accept", "content": answer{"n": 1}} })
	if _, err := s.UI().Elicit(ctx, "m", json.RawMessage(`{"type":"object"}`)); err != nil {
		t.Error(err)
	}
	calls := p.calls("session.ui.elicitation")
	if want := fmt.Sprintf(`{"sessionId":%q,"message":"m","requestedSchema":{"type":"object"}}`, s.ID()); !sameJSON(calls[len(calls)-1].Params, []byte(want)) {
		t.Errorf("sent %s, want %s", calls[len(calls)-1].Params, want)
	}
}

func TestUIRefused(t *testing.T) {
	leakCheck(t)
	s, p := elicitingPeer(t)
	p.emit(s.ID(), "capabilities.changed", map[string]any{"ui": map[string]any{"elicitation": false}})
	p.sync()
	ctx := testContext(t)
	before := len(p.calls(""))
	for name, call := range map[string]func() error{
		"Confirm": func() error { _, err := s.UI().Confirm(ctx, "m"); return err },
		"Select":  func() error { _, _, err := s.UI().Select(ctx, "m", []string{"a"}); return err },
		"Input":   func() error { _, _, err := s.UI().Input(ctx, "m", nil); return err },
		"Elicit":  func() error { _, err := s.UI().Elicit(ctx, "m", map[string]any{}); return err },
	} {
		if err := call(); !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s: got %v, want ErrNotSupported", name, err)
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests", got-before)
	}
	s.end(ErrClosed)
	if _, err := s.UI().Confirm(ctx, "m"); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}

func TestCase037PromptBytes(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	const prompt = "<a href=\"x\">&</a>\u2028\U0001F600 é\\u003c"
	if _, err := s.Send(testContext(t), Message{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	if err := s.Log(testContext(t), prompt, nil); err != nil {
		t.Fatal(err)
	}
	for method, name := range map[string]string{"session.send": "prompt", "session.log": "message"} {
		m := p.wait(method, 1)
		if got := m.get(name); got != prompt {
			t.Errorf("%s: text is %q, want %q", method, got, prompt)
		}
		if !bytes.Contains(m.Params, []byte(`<a href=\"x\">&</a>`)) {
			t.Errorf("%s: escaped without need: %s", method, m.Params)
		}
	}
}

func TestCase038ResultNames(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("status.get", func(p *peer, m peerMessage) any {
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "Result": map[string]any{"version": "wrong"}}, // no response
			map[string]any{"jsonrpc": "2.0", "id": m.ID, "Result": map[string]any{"version": "wrong"}, "result": map[string]any{"version": "right"}})
		return noAnswer
	})
	if got, err := c.Status(testContext(t)); err != nil || got.Version != "right" {
		t.Errorf("got %+v, %v", got, err)
	}
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	defer sub.Close()
	event := map[string]any{"id": "e", "type": "session.idle", "TYPE": "wrong", "data": map[string]any{}}
	p.send(map[string]any{"jsonrpc": "2.0", "method": "session.event", "METHOD": "wrong", "params": map[string]any{"sessionId": s.ID(), "sessionID": "wrong", "event": event}},
		map[string]any{"jsonrpc": "2.0", "method": "session.event", "params": map[string]any{"sessionID": s.ID(), "event": event}}, // of no session
		p.event(s.ID(), "last", nil))
	if e := next(t, sub); e.Type != EventSessionIdle {
		t.Errorf("first event is %s", e.Type)
	}
	if e := next(t, sub); e.Type != "last" {
		t.Errorf("second event is %s", e.Type)
	}
}

func TestCase040RequestIDs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{
		"test.echo": func(context.Context, string, json.RawMessage) (any, error) { return 1, nil },
	}})
	for _, method := range []string{"test.echo", "test.unknown"} {
		for _, id := range []string{`7`, `"7"`, `9007199254740993`, `-1`, `1.5`, `""`, `"é"`, `"\u00e9"`} {
			answer := make(chan peerMessage, 1)
			p.mu.Lock()
			p.answers[id] = answer
			p.mu.Unlock()
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":%q}`, id, method)
			p.raw(fmt.Appendf(nil, "Content-Length: %d\r\n\r\n%s", len(body), body))
			if got := await(t, "answer to "+id, answer); string(got.ID) != id {
				t.Errorf("%s: answered %s", id, got.ID)
			}
		}
	}
	// Responses that answer nothing disturb nobody.
	p.handle("ping", func(p *peer, m peerMessage) any {
		for _, id := range []any{nil, "1", -1, 1.5, 1 << 40, json.RawMessage(`"` + string(m.ID) + `"`), json.RawMessage(`1e0`), []any{}} {
			p.send(map[string]any{"jsonrpc": "2.0", "id": id, "result": map[string]any{"message": "wrong"}})
		}
		return map[string]any{"message": "right"}
	})
	if got, err := c.Ping(testContext(t), ""); err != nil || got.Message != "right" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestCase058History(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	p.handle("session.getMessages", func(*peer, peerMessage) any {
		return json.RawMessage(`{"events":[
			{"id":"1","type":"future.thing","data":{"a":1.0}},
			7, null, "x", [],
			{"id":"2","type":"assistant.message","data":{"messageId":"m","content":"x","fromTheFuture":[1]}},
			{"id":"3","type":"assistant.message","data":{"content":7}},
			{"id":"4","type":"session.idle"},
			{"id":"5","type":"session.idle","data":null,"timestamp":"yesterday"}]}`)
	})
	events, err := s.History(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events {
		kind := "typed"
		if raw, ok := e.Payload().(*RawPayload); ok {
			kind = fmt.Sprintf("raw %s, error %t", raw.Data, raw.Err != nil)
		}
		got = append(got, e.ID+" "+kind)
	}
	want := []string{`1 raw {"a":1.0}, error false`, "2 typed", `3 raw {"content":7}, error true`, "4 typed", "5 typed"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	p.handle("session.getMessages", func(*peer, peerMessage) any { return nil })
	if events, err := s.History(testContext(t)); err != nil || len(events) != 0 {
		t.Errorf("null: got %v, %v", events, err)
	}
}

func TestCase059OnceAndNotMixed(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, streaming := range []bool{true, false} {
		s := createSession(t, c, &SessionConfig{Streaming: streaming})
		creates := p.calls("session.create")
		if got := creates[len(creates)-1].get("streaming"); got != streaming {
			t.Errorf("streaming is sent as %v, want %v", got, streaming)
		}
		sends := len(p.calls("session.send"))
		id := fmt.Sprint("m", sends+1)
		text := make(chan string, 1)
		turn := async(func() error {
			var streamed, final strings.Builder
			for e, err := range s.Ask(testContext(t), Message{Prompt: "x"}) {
				if err != nil {
					return err
				}
				if e.AgentID != "" {
					continue
				}
				switch d := e.Payload().(type) {
				case *AssistantMessageDelta:
					streamed.WriteString(d.DeltaContent)
				case *AssistantMessage:
					final.WriteString(d.Content)
				}
			}
			text <- streamed.String() + "|" + final.String()
			return nil
		})
		p.wait("session.send", sends+1)
		p.emit(s.ID(), "user.message", map[string]any{"messageId": id})
		delta := func(text string, extra ...any) {
			p.emit(s.ID(), "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": text}, append(extra, "ephemeral", true)...)
		}
		want := "|ab"
		if streaming {
			want = "ab|ab"
			delta("a")
			delta("sub", "agentId", "helper")
			delta("b")
		}
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "s", "content": "sub"}, "agentId", "helper")
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": "ab"})
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "s", "content": "sub"}, "agentId", "helper")
		p.emit(s.ID(), "session.idle", nil, "agentId", "helper") // not the turn's end
		p.emit(s.ID(), "session.idle", nil)
		if err := await(t, "turn", turn); err != nil {
			t.Fatal(err)
		}
		if got := <-text; got != want {
			t.Errorf("streaming %v: got %q, want %q", streaming, got, want)
		}
	}
}

func TestCase061IdleWithBackgroundWork(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	for i, tt := range []struct {
		tasks string // in the idle's data
		end   bool
	}{
		{``, true}, {`null`, true}, {`[]`, true}, {`{}`, true}, {`{"agents":[],"shells":[]}`, true}, {`"x"`, true},
		{`["x"]`, false}, {`[{"id":"1"}]`, false}, {`{"agents":[],"shells":[{"shellId":"1"}]}`, false},
	} {
		result := make(chan string, 1)
		turn := async(func() error {
			m, err := s.SendAndWait(testContext(t), Message{Prompt: "x"})
			if err == nil {
				result <- m.Content
			}
			return err
		})
		p.wait("session.send", i+1)
		p.sync() // the answer to the send has been seen
		idle := json.RawMessage(`{}`)
		if tt.tasks != "" {
			idle = json.RawMessage(`{"backgroundTasks":` + tt.tasks + `}`)
		}
		p.emit(s.ID(), "user.message", map[string]any{"messageId": fmt.Sprint("m", i+1)})
		p.emit(s.ID(), "assistant.message", map[string]any{"content": "first"})
		p.emit(s.ID(), "session.idle", idle)
		p.emit(s.ID(), "assistant.message", map[string]any{"content": "second"})
		p.emit(s.ID(), "session.idle", nil)
		if err := await(t, "turn", turn); err != nil {
			t.Fatal(err)
		}
		if got := <-result; (got == "first") != tt.end {
			t.Errorf("backgroundTasks %s: the turn ended with the %s message", tt.tasks, got)
		}
		p.sync()
	}
}

func TestCase062ErrorWithoutIdle(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "query", "message": "no", "statusCode": 400, "errorCode": "c", "url": "u"})
	err := await(t, "turn", turn)
	var failed *AgentError
	if !errors.As(err, &failed) || *failed != (AgentError{Type: "query", Message: "no", StatusCode: 400, Code: "c", URL: "u"}) {
		t.Errorf("got %#v", err)
	}

	s = createSession(t, c, nil)
	got := make(chan string, 1)
	turn = async(func() error {
		m, err := s.SendAndWait(testContext(t), Message{})
		if err == nil {
			got <- m.Content
		}
		return err
	})
	p.wait("session.send", 2)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m2"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "rate_limit", "message": "slow", "eligibleForAutoSwitch": true})
	p.emit(s.ID(), "assistant.message", map[string]any{"content": "after all"})
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Fatal(err)
	}
	if m := <-got; m != "after all" {
		t.Errorf("got %q", m)
	}
}

// No clock of the library's runs while a turn is at work: the wait has no deadline, and the turn no timer that could end it.
func TestCase063NoHiddenLimit(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(context.Background(), Message{}); return err })
	p.wait("session.send", 1)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	at := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	for hour := range 100 { // by the server's clock
		p.emit(s.ID(), "assistant.turn_start", nil, "timestamp", at.Add(time.Duration(hour)*time.Hour))
	}
	p.sync()
	s.mu.Lock()
	if running := s.turns.active; running == nil || running.backstop != nil {
		t.Errorf("the turn is %+v", running)
	}
	s.mu.Unlock()
	select {
	case err := <-turn:
		t.Fatalf("ended early: %v", err)
	default:
	}
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Error(err)
	}
}

func TestCase069WhatWasSeen(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	for name, ask := range map[string]func(ctx context.Context) error{
		"SendAndWait": func(ctx context.Context) error { _, err := s.SendAndWait(ctx, Message{}); return err },
		"Ask": func(ctx context.Context) error {
			for _, err := range s.Ask(ctx, Message{}) {
				if err != nil {
					return err
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := len(p.calls("session.send")) + 1
			stuck := errors.New("stuck")
			ctx, cancel := context.WithCancelCause(testContext(t))
			turn := async(func() error { return ask(ctx) })
			p.wait("session.send", n)
			p.emit(s.ID(), "user.message", map[string]any{"messageId": fmt.Sprint("m", n)})
			p.emit(s.ID(), "assistant.turn_start", nil)
			for _, tool := range []string{"bash", "view", "edit"} {
				p.emit(s.ID(), "tool.execution_start", map[string]any{"toolCallId": "c-" + tool, "toolName": tool})
			}
			p.emit(s.ID(), "tool.execution_complete", map[string]any{"toolCallId": "c-view", "success": false})
			p.emit(s.ID(), "permission.requested", map[string]any{"requestId": "r1"})
			p.emit(s.ID(), "permission.requested", map[string]any{"requestId": "r2"})
			p.emit(s.ID(), "permission.completed", map[string]any{"requestId": "r1"})
			p.emit(s.ID(), "assistant.turn_end", nil) // no end of the turn
			p.sync()
			select {
			case err := <-turn:
				t.Fatalf("ended: %v", err)
			default:
			}
			cancel(stuck)
			err := await(t, "turn", turn)
			var seen *TurnError
			if !errors.As(err, &seen) || !errors.Is(err, context.Canceled) || !errors.Is(err, stuck) {
				t.Fatalf("got %v", err)
			}
			if seen.LastEvent != "assistant.turn_end" || seen.LastEventAge < 0 || seen.Events != 10 || seen.OpenPermissions != 1 || !slices.Equal(seen.OpenTools, []string{"bash", "edit"}) {
				t.Errorf("got %+v", seen)
			}
			for _, part := range []string{"10 events", "assistant.turn_end", "bash, edit", "1"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q lacks %q", err, part)
				}
			}
			p.emit(s.ID(), "session.idle", nil)
			p.sync()
		})
	}
	expired, cancel := context.WithDeadline(testContext(t), time.Unix(0, 0))
	defer cancel()
	if _, err := s.SendAndWait(expired, Message{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}
}

func TestCase089SecretsInTexts(t *testing.T) {
	leakCheck(t)
	const token, key, variable = "tok-123456789", "key-123456789", "env-123456789"
	var logged bytes.Buffer
	opts := &Options{
		ConnectionToken: token,
		Env:             []string{"MY_API_KEY=" + variable, "PATH=/bin"},
		Logger:          slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	c, p := newPeer(t, opts)
	s := createSession(t, c, &SessionConfig{Provider: &ProviderConfig{Type: "openai", BaseURL: "http://127.0.0.1", APIKey: key}})
	hidden := []string{token, key, variable, s.ID()}
	words := strings.Join(hidden, " ")
	check := func(what, text string, list ...string) {
		t.Helper()
		for _, secret := range append(list, token, key, variable) {
			if strings.Contains(text, secret) {
				t.Errorf("%s shows %q: %s", what, secret, text)
			}
		}
	}
	p.refuse("status.get", -32603, words)
	_, err := c.Status(testContext(t))
	check("client call", err.Error(), hidden...)
	p.refuse("session.name.get", -32603, words)
	_, err = s.Name(testContext(t))
	check("session call", err.Error(), hidden...)
	var refused *RPCError
	if !errors.As(err, &refused) || refused.Message != words {
		t.Errorf("the server's words are %v", refused)
	}
	p.handle("session.setForeground", func(*peer, peerMessage) any { return map[string]any{"success": false, "error": words} })
	check("refusal", c.SetForegroundSessionID(testContext(t), s.ID()).Error(), hidden...)
	p.handle("session.mode.get", func(*peer, peerMessage) any { return []any{words} })
	_, err = s.Mode(testContext(t))
	check("misfit", err.Error(), hidden...)
	p.handle("session.getMessages", func(*peer, peerMessage) any { return map[string]any{"events": []any{7}} })
	if _, err := s.History(testContext(t)); err != nil {
		t.Error(err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		check(verb, fmt.Sprintf(verb, *opts), fmt.Sprintf("%x", token))
		check(verb, fmt.Sprintf(verb, opts), fmt.Sprintf("%x", token))
	}
	text, err := json.Marshal(opts)
	if err != nil {
		t.Error(err)
	}
	check("JSON", string(text))
	opts.Logger.Info("options", "opts", opts, "copy", *opts)
	c.ForceStop()
	await(t, "client's end", c.Done())
	_, err = s.Name(testContext(t))
	check("after the end", err.Error(), hidden...)
	check("log", logged.String(), s.ID())
	if !strings.Contains(logged.String(), redacted) {
		t.Errorf("the log does not show the options: %s", logged.String())
	}
}

// schemaResults are the results of the server's methods, in schemas, and the types that take them.
func schemaResults() map[string]any {
	return map[string]any{
		"ping":                             PingResult{},
		"models.list":                      map[string][]Model{"models": nil},
		"account.getQuota":                 Quota{},
		"sessions.list":                    map[string][]SessionInfo{"sessions": nil},
		"session.model.getCurrent":         CurrentModel{},
		"session.mode.get":                 AgentMode(""),
		"session.name.get":                 map[string]string{"name": ""},
		"session.plan.read":                Plan{},
		"session.workspaces.listFiles":     map[string][]string{"files": nil},
		"session.workspaces.readFile":      map[string]string{"content": ""},
		"session.fleet.start":              map[string]bool{"started": false},
		"session.history.compact":          Compaction{},
		"session.history.truncate":         map[string]int{"eventsRemoved": 0},
		"sessions.fork":                    map[string]string{"sessionId": ""},
		"session.log":                      map[string]string{"eventId": ""},
		"session.agent.list":               map[string][]AgentInfo{"agents": nil},
		"session.agent.getCurrent":         map[string]AgentInfo{"agent": {}},
		"session.skills.list":              map[string][]LoadedSkill{"skills": nil},
		"session.mcp.list":                 map[string][]LoadedMCPServer{"servers": nil},
		"session.tools.getCurrentMetadata": map[string][]ToolInfo{"tools": nil},
		"session.tasks.list":               map[string][]TaskInfo{"tasks": nil},
		"session.tasks.cancel":             map[string]bool{"cancelled": false},
		"session.queue.pendingItems":       Queue{},
		"session.usage.getMetrics":         Usage{},
		"session.permissions.getMode":      map[string]PermissionMode{"mode": ""},
		"session.permissions.setMode":      map[string]bool{"success": false},
		"session.canvas.listOpen":          map[string][]OpenCanvas{"openCanvases": nil},
		"session.abort":                    map[string]bool{"success": false},
	}
}

// resultDifferences lists where the results' types are not the schema's.
var resultDifferences = map[string]string{
	"account.getQuota.quotaSnapshots.*.hasQuota":           "the type is the event's, which has more",
	"account.getQuota.quotaSnapshots.*.overageEntitlement": "the type is the event's",
	"account.getQuota.quotaSnapshots.*.tokenBasedBilling":  "the type is the event's",
	"session.mcp.list.servers[].pluginName":                "the type is the event's; the list says sourcePlugin",
	"session.mcp.list.servers[].pluginVersion":             "the type is the event's",
	"session.mcp.list.servers[].transport":                 "the type is the event's",
	"sessions.list.sessions[].context.baseCommit":          "the type is the event's",
	"sessions.list.sessions[].context.headCommit":          "the type is the event's",
	"sessions.list.sessions[].context.pendingGitContext":   "the type is the event's",
	"sessions.list.sessions[].context.repositoryHost":      "the type is the event's",
	"sessions.list.sessions[].modifiedTime":                "called ISO 8601 in its description only",
	"sessions.list.sessions[].startTime":                   "called ISO 8601 in its description only",
}

func TestSchemaResults(t *testing.T) {
	dir := os.Getenv("COPILOT_SCHEMA_DIR")
	if dir == "" {
		t.Skip("skipped: COPILOT_SCHEMA_DIR is not set, so there is no schema to compare with")
	}
	text, err := os.ReadFile(filepath.Join(dir, "api.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema schemaFile
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	methods := make(map[string]map[string]any)
	var collect func(node map[string]any)
	collect = func(node map[string]any) {
		if name, ok := node["rpcMethod"].(string); ok {
			methods[name] = node
			return
		}
		for _, child := range node {
			if child, ok := child.(map[string]any); ok {
				collect(child)
			}
		}
	}
	collect(schema["server"].(map[string]any))
	collect(schema["session"].(map[string]any))
	c := &conformance{t: t, schema: schema, listed: resultDifferences, used: make(map[string]bool)}
	for name, result := range schemaResults() {
		method := methods[name]
		if method == nil {
			t.Errorf("%s is not in the schema", name)
			continue
		}
		node := method["result"].(map[string]any)
		typ := reflect.TypeOf(result)
		if typ.Kind() != reflect.Map {
			c.check(name, typ, node)
			continue
		}
		member := reflect.ValueOf(result).MapKeys()[0].String() // stands for a struct with one member
		var found []any
		for _, alt := range schema.alternatives(node) {
			if p, ok := alt["properties"].(map[string]any)[member]; ok {
				found = append(found, p)
			}
		}
		if len(found) == 0 {
			t.Errorf("%s.%s is not in the schema", name, member)
			continue
		}
		c.check(name+"."+member, typ.Elem(), map[string]any{"anyOf": found})
	}
	c.finish()
	t.Logf("typed: results of %d of the schema's %d methods", len(schemaResults()), len(methods))
}

// TestRealHelpers runs the helpers against the real CLI.
func TestRealHelpers(t *testing.T) {
	c := startReal(t, Options{})
	model := newModelServer(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	config := &SessionConfig{Model: "fake-model", WorkingDirectory: dir,
		Provider:     &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: model.URL + "/v1", APIKey: "dummy"},
		CustomAgents: []CustomAgent{{Name: "helper", Description: "helps", Prompt: "help"}}}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	if got, err := c.Ping(ctx, "hi"); err != nil || got.Message != "pong: hi" || got.Timestamp.IsZero() || got.ProtocolVersion != 3 {
		t.Errorf("ping: %+v, %v", got, err)
	}
	if got, err := c.Status(ctx); err != nil || got.Version != c.Server().Version || got.ProtocolVersion != 3 {
		t.Errorf("status: %+v, %v", got, err)
	}
	if got, err := c.AuthStatus(ctx); err != nil || got.IsAuthenticated || got.StatusMessage == "" {
		t.Errorf("auth: %+v, %v", got, err)
	}
	if _, err := c.Models(ctx); !errors.Is(err, ErrAuthentication) {
		t.Errorf("models: %v", err)
	}
	if _, err := c.Quota(ctx); !errors.Is(err, ErrAuthentication) {
		t.Errorf("quota: %v", err)
	}
	if list, err := c.Sessions(ctx, nil); err != nil || len(list) != 0 {
		t.Errorf("sessions: %+v, %v", list, err)
	}
	if id, err := c.LastSessionID(ctx); err != nil || id != "" {
		t.Errorf("last: %q, %v", id, err)
	}
	must(c.SendTelemetry(ctx, TelemetryEvent{Kind: "k", Properties: map[string]string{"p": "v"}, Metrics: map[string]float64{"m": 1}}))

	s, err := c.CreateSession(ctx, config)
	must(err)
	if s.WorkspacePath() == "" || s.Capabilities() != (Capabilities{}) || len(s.OpenCanvases()) != 0 {
		t.Errorf("session: %q, %+v, %v", s.WorkspacePath(), s.Capabilities(), s.OpenCanvases())
	}
	if m, err := s.SendAndWait(ctx, Message{Prompt: "say: hello"}); err != nil || m.Content != "hello" {
		t.Fatalf("turn: %+v, %v", m, err)
	}
	if got, err := s.Tools(ctx); err != nil || len(got) == 0 || got[0].Name == "" || len(got[0].InputSchema) == 0 {
		t.Errorf("tools: %d, %v", len(got), err)
	}

	// A log entry of level error, during a turn and stored or not, does not end it.
	for _, o := range []LogOptions{{Level: LogError}, {Level: LogError, Ephemeral: true}, {Level: LogWarning, Type: "t"}, {URL: "https://example.invalid/", Tip: "x"}} {
		sub := s.Subscribe()
		turn := async(func() error {
			m, err := s.SendAndWait(ctx, Message{Prompt: "hold: all is well"})
			if err == nil && m.Content != "all is well" {
				err = fmt.Errorf("got %q", m.Content)
			}
			return err
		})
		await(t, "held answer", model.Held)
		must(s.Log(ctx, "logged", &o))
		model.Release()
		if err := await(t, "turn", turn); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
		found := false
		for !found {
			e := next(t, sub)
			found = string(member(e.Data, "message")) == `"logged"`
			if found && e.Ephemeral != o.Ephemeral {
				t.Errorf("%+v: event %+v", o, e)
			}
		}
		sub.Close()
		s.mu.Lock()
		if ts := &s.turns; ts.logging != 0 || len(ts.logged) != 0 || len(ts.recent) != 0 {
			t.Errorf("%+v: left behind: %+v", o, ts)
		}
		s.mu.Unlock()
	}

	if got, err := s.Model(ctx); err != nil || got.ModelID != "fake-model" {
		t.Errorf("model: %+v, %v", got, err)
	}
	must(s.SetModel(ctx, "other-model", &ModelOptions{ResetReasoningEffort: true}))
	if got, err := s.Model(ctx); err != nil || got.ModelID != "other-model" {
		t.Errorf("model: %+v, %v", got, err)
	}
	must(s.SetMode(ctx, AgentModePlan))
	if got, err := s.Mode(ctx); err != nil || got != AgentModePlan {
		t.Errorf("mode: %q, %v", got, err)
	}
	var refused *RPCError
	if err := s.SetMode(ctx, "sleepy"); !errors.As(err, &refused) {
		t.Errorf("unknown mode: %v", err)
	}
	must(s.SetMode(ctx, AgentModeInteractive))
	must(s.SetName(ctx, "my <name>"))
	if got, err := s.Name(ctx); err != nil || got != "my <name>" {
		t.Errorf("name: %q, %v", got, err)
	}
	if got, err := s.ReadPlan(ctx); err != nil || got.Exists || got.Path == "" {
		t.Errorf("plan: %+v, %v", got, err)
	}
	must(s.UpdatePlan(ctx, "# plan"))
	if got, err := s.ReadPlan(ctx); err != nil || !got.Exists || got.Content != "# plan" {
		t.Errorf("plan: %+v, %v", got, err)
	}
	must(s.DeletePlan(ctx))
	must(s.CreateWorkspaceFile(ctx, "notes/a.txt", "alpha"))
	if got, err := s.WorkspaceFiles(ctx); err != nil || !slices.Equal(got, []string{"notes/a.txt"}) {
		t.Errorf("files: %q, %v", got, err)
	}
	if got, err := s.ReadWorkspaceFile(ctx, "notes/a.txt"); err != nil || got != "alpha" {
		t.Errorf("file: %q, %v", got, err)
	}
	if _, err := s.ReadWorkspaceFile(ctx, "none"); !errors.As(err, &refused) {
		t.Errorf("no file: %v", err)
	}
	if got, err := s.Agents(ctx); err != nil || len(got) != 1 || got[0].Name != "helper" {
		t.Errorf("agents: %+v, %v", got, err)
	}
	if got, err := s.Agent(ctx); err != nil || got != nil {
		t.Errorf("agent: %+v, %v", got, err)
	}
	must(s.SelectAgent(ctx, "helper"))
	if got, err := s.Agent(ctx); err != nil || got == nil || got.Name != "helper" {
		t.Errorf("agent: %+v, %v", got, err)
	}
	must(s.SelectAgent(ctx, ""))
	if got, err := s.Skills(ctx); err != nil || len(got) == 0 || got[0].Name == "" {
		t.Errorf("skills: %+v, %v", got, err)
	}
	if got, err := s.MCPServers(ctx); err != nil || len(got) != 0 {
		t.Errorf("servers: %+v, %v", got, err)
	}
	if got, err := s.Tasks(ctx); err != nil || len(got) != 0 {
		t.Errorf("tasks: %+v, %v", got, err)
	}
	if got, err := s.CancelTask(ctx, "none"); err != nil || got {
		t.Errorf("cancel: %v, %v", got, err)
	}
	if got, err := s.Queue(ctx); err != nil || len(got.Items) != 0 {
		t.Errorf("queue: %+v, %v", got, err)
	}
	must(s.ClearQueue(ctx))
	if got, err := s.Usage(ctx); err != nil || got.TotalUserRequests != 5 || got.ModelMetrics["fake-model"].Requests.Count != 5 || got.SessionStartTime.IsZero() {
		t.Errorf("usage: %+v, %v", got, err)
	}
	must(s.SetPermissionMode(ctx, PermissionsAllowAll))
	if got, err := s.PermissionMode(ctx); err != nil || got != PermissionsAllowAll {
		t.Errorf("permission mode: %q, %v", got, err)
	}
	must(s.SendTelemetry(ctx, TelemetryEvent{Kind: "k"}))
	if _, err := s.UI().Confirm(ctx, "sure?"); !errors.Is(err, ErrNotSupported) {
		t.Errorf("confirm: %v", err)
	}
	if got, err := s.Compact(ctx); err != nil || !got.Success || got.SummaryContent == "" || got.ContextWindow == nil {
		t.Errorf("compact: %+v, %v", got, err)
	}

	history, err := s.History(ctx)
	must(err)
	var messages []string // ids of the user's messages
	for _, e := range history {
		if e.Type == EventUserMessage {
			messages = append(messages, e.ID)
		}
	}
	if len(messages) != 5 {
		t.Fatalf("%d messages in the history", len(messages))
	}
	fork, err := c.ForkSession(ctx, s.ID(), messages[2])
	if err != nil || fork == "" || fork == s.ID() {
		t.Fatalf("fork: %q, %v", fork, err)
	}
	if n, err := s.Truncate(ctx, messages[1]); err != nil || n == 0 {
		t.Errorf("truncate: %d, %v", n, err)
	}
	if again, err := s.History(ctx); err != nil || len(again) >= len(history) {
		t.Errorf("%d of %d events after truncate, %v", len(again), len(history), err)
	}
	must(s.StartFleet(ctx, "say: fleet"))

	resolved, err := filepath.EvalSymlinks(dir)
	must(err)
	if got, err := c.SessionInfo(ctx, s.ID()); err != nil || got == nil || got.SessionID != s.ID() || got.Name != "my <name>" || got.StartTime.IsZero() ||
		got.Context == nil || got.Context.CWD != dir && got.Context.CWD != resolved {
		t.Errorf("info: %+v, %v", got, err)
	}
	if list, err := c.Sessions(ctx, &SessionFilter{CWD: dir}); err != nil || !slices.ContainsFunc(list, func(i SessionInfo) bool { return i.SessionID == s.ID() }) {
		t.Errorf("sessions: %+v, %v", list, err)
	}
	if list, err := c.Sessions(ctx, &SessionFilter{CWD: filepath.Join(dir, "none")}); err != nil || len(list) != 0 {
		t.Errorf("sessions elsewhere: %+v, %v", list, err)
	}
	if id, err := c.LastSessionID(ctx); err != nil || id == "" {
		t.Errorf("last: %q, %v", id, err)
	}
	if id, err := c.ForegroundSessionID(ctx); err != nil || id != "" {
		t.Errorf("foreground: %q, %v", id, err)
	}
	if err := c.SetForegroundSessionID(ctx, s.ID()); !errors.As(err, &refused) || strings.Contains(err.Error(), s.ID()) {
		t.Errorf("set foreground: %v", err)
	}
	must(c.DeleteSession(ctx, s.ID()))
	await(t, "the session's end", s.Context().Done())
	if err := c.DeleteSession(ctx, s.ID()); !errors.Is(err, ErrSessionNotFound) || strings.Contains(err.Error(), s.ID()) {
		t.Errorf("delete again: %v", err)
	}
	must(c.DeleteSession(ctx, fork))
	if got, err := c.SessionInfo(ctx, s.ID()); err != nil || got != nil {
		t.Errorf("info of none: %+v, %v", got, err)
	}
}

// TestRealElicitation has a session that asks itself.
func TestRealElicitation(t *testing.T) {
	c := startReal(t, Options{})
	ctx := testContext(t)
	s := createSession(t, c, &SessionConfig{OnElicitation: func(ctx context.Context, _ ElicitationRequest) (ElicitationResult, error) {
		<-ctx.Done() // the test answers
		return ElicitationResult{}, ctx.Err()
	}})
	if !s.Capabilities().UI.Elicitation {
		t.Fatalf("capabilities are %+v", s.Capabilities())
	}
	sub := s.Subscribe()
	defer sub.Close()
	answer := func(result any) {
		t.Helper()
		e := next(t, sub)
		for ; e.Type != EventElicitationRequested; e = next(t, sub) {
		}
		if err := s.Call(ctx, "session.ui.handlePendingElicitation", map[string]any{"requestId": unquote(member(e.Data, "requestId")), "result": result}, nil); err != nil {
			t.Fatal(err)
		}
	}
	content := func(name string, value any) map[string]any {
		return map[string]any{"action": "accept", "content": map[string]any{name: value}}
	}
	for _, tt := range []struct {
		name   string
		result any
		ask    func() (any, bool, error)
		want   any
		ok     bool
	}{
		{"Confirm", content("confirmed", true), func() (any, bool, error) { yes, err := s.UI().Confirm(ctx, "sure?"); return yes, yes, err }, true, true},
		{"Select", content("selection", "b"), func() (any, bool, error) { return s.UI().Select(ctx, "which?", []string{"a", "b"}) }, "b", true},
		{"Input", content("value", "x"), func() (any, bool, error) { return s.UI().Input(ctx, "what?", &InputOptions{MaxLength: 3}) }, "x", true},
		{"declined", map[string]any{"action": "decline"}, func() (any, bool, error) { return s.UI().Input(ctx, "what?", nil) }, "", false},
	} {
		result := async(func() error {
			got, ok, err := tt.ask()
			if err == nil && (got != tt.want || ok != tt.ok) {
				err = fmt.Errorf("got %v, %v, want %v, %v", got, ok, tt.want, tt.ok)
			}
			return err
		})
		answer(tt.result)
		if err := await(t, tt.name, result); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
