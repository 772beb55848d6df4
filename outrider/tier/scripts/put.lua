-- Store one block, and make room for it within the budget.
-- KEYS: index, block. ARGV: bytes, name in the index, TTL in ms, most blocks, prefix of the blocks' keys.
-- The index holds every block's name with the time in ms at which it expires. Returns how many blocks had to go.
-- The block comes first: a full server refuses a script's first write only.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[3])

redis.call('SET', KEYS[2], ARGV[1], 'PX', ttl)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl), ARGV[2])
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local over = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[4])
if over <= 0 then
  return 0
end
local popped = redis.call('ZPOPMIN', KEYS[1], over)
for at = 1, #popped, 2 do
  redis.call('UNLINK', ARGV[5] .. popped[at])
end
return over
